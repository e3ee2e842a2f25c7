//! A model as model hubs lay it out reads as the same model in GGUF: same tokens, same logits.
#![allow(clippy::unwrap_used, reason = "a test may stop where its ground is missing")]

mod common;

use std::fs;

use common::{PROSE, TIER2, load, log_softmax, pocket, read};
use molt_kv::decoder::StopFlag;
use molt_kv::ledger::Ledger;
use molt_models::file::ModelFile;
use molt_models::kernels::Format;
use molt_models::{Embedding, Model, Precision, Stored, Tokenizer};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

/// The name that the transformers library has for a tensor.
fn hub_name(name: &str) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".to_owned(),
        "output_norm.weight" => return "model.norm.weight".to_owned(),
        _ => {}
    }
    let mut parts = name.split('.');
    let (_, layer, part, kind) =
        (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap());
    let module = match part {
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        "attn_norm" => "input_layernorm",
        _ => "post_attention_layernorm",
    };
    format!("model.layers.{layer}.{module}.{kind}")
}

#[test]
fn a_hub_folder_is_the_same_model() {
    let (ladder, ledger) = (pocket(), Ledger::new());
    let file = ladder.rung(TIER2).unwrap().file();
    let c = file.config();
    let folder = tempfile::tempdir().unwrap();
    let tensors: Vec<(String, Dtype, Vec<usize>, &[u8])> = file
        .tensors()
        .map(|(name, t)| {
            let dtype = if t.format == Format::F16 { Dtype::F16 } else { Dtype::F32 };
            let shape = if t.rows == 1 { vec![t.columns] } else { vec![t.rows, t.columns] };
            (hub_name(name), dtype, shape, &file.region().bytes()[t.range.clone()])
        })
        .collect();
    let views = tensors.iter().map(|(n, d, s, b)| (n.as_str(), TensorView::new(*d, s.clone(), b).unwrap()));
    let path = folder.path().join("model.safetensors");
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let config = json!({
        "model_type": "qwen2", "num_hidden_layers": c.layers, "hidden_size": c.width, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "intermediate_size": c.ffn_width, "vocab_size": c.vocab,
        "max_position_embeddings": c.trained_context, "rope_theta": c.rope_base, "rms_norm_eps": c.rms_eps,
        "eos_token_id": 0, "bos_token_id": 0,
    });
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let tokenizer = ladder.tokenizer().to_json().unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();

    let hub = ModelFile::open(&path).unwrap();
    assert_eq!(hub.config(), c);
    assert_eq!(hub.vocabulary().fingerprint(), file.vocabulary().fingerprint(), "one ladder may hold both");
    let tokens = Tokenizer::new(hub.vocabulary(), &path).unwrap().encode(PROSE).unwrap();
    assert_eq!(tokens, ladder.tokenizer().encode(PROSE).unwrap());
    let precision = Precision { linear: Stored::F32, table: Stored::F32 };
    let model = Model::load(&hub, "hub", precision, Embedding::Shared, &ledger, &StopFlag::new()).unwrap();
    let (_, hidden) = read(&model, &tokens, &ledger);
    let original = load(&ladder, TIER2, &ledger);
    let (_, expected) = read(&original, &tokens, &ledger);
    assert_eq!(log_softmax(&model, &hidden), log_softmax(&original, &expected));

    // The same with a config that contradicts the weights.
    let wrong = config.to_string().replace("\"hidden_size\":128", "\"hidden_size\":64");
    fs::write(folder.path().join("config.json"), wrong).unwrap();
    let reason = ModelFile::open(&path).unwrap_err().to_string();
    assert!(reason.contains("model.safetensors") && reason.contains("64"), "{reason}");
}
