//! Safetensors files as model hubs lay them out: weights under the names of the transformers library, the shape in
//! `config.json` and the tokenizer in `tokenizer.json` beside them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use molt_kv::region::FileRegion;
use safetensors::tensor::{Dtype, SafeTensors};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::config::{ModelConfig, RopePairing};
use crate::error::ModelError;
use crate::file::{ModelFile, TensorEntry, apart, place};
use crate::kernels::Format;
use crate::tokenizer::Vocabulary;

#[derive(Deserialize)]
struct Config {
    model_type: String,
    num_hidden_layers: usize,
    hidden_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    rope_theta: Option<f32>,
    rope_scaling: Option<serde_json::Value>,
    rms_norm_eps: f32,
    eos_token_id: Option<Ids>,
    bos_token_id: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

#[derive(Deserialize)]
struct TokenizerJson {
    model: Bpe,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    pre_tokenizer: serde_json::Value,
}

#[derive(Deserialize)]
struct Bpe {
    vocab: BTreeMap<String, u32>,
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Joined(String),
    Pair(String, String),
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize, Default)]
struct TokenizerConfig {
    chat_template: Option<String>,
}

pub(super) fn read(region: Arc<FileRegion>) -> Result<ModelFile, ModelError> {
    let path = region.path().to_owned();
    let malformed = |reason: String| ModelError::Malformed { path: path.clone(), reason };
    let folder = path.parent().unwrap_or(Path::new("."));
    let config: Config = json(&folder.join("config.json"))?;
    if !["qwen2", "llama"].contains(&config.model_type.as_str()) {
        return Err(ModelError::Family { path: path.clone(), family: config.model_type });
    }
    if config.rope_scaling.as_ref().is_some_and(|s| !s.is_null()) {
        return Err(malformed("its config.json scales the rotary frequencies, which the decoder does not do".into()));
    }
    let (header, metadata) =
        SafeTensors::read_metadata(region.bytes()).map_err(|e| malformed(format!("its safetensors header: {e}")))?;
    let data = header as u64 + 8;
    let mut tensors = BTreeMap::new();
    for (name, info) in metadata.tensors() {
        let Some(own_name) = gguf_name(&name) else { continue };
        let error = |reason| ModelError::Tensor { path: path.clone(), tensor: name.clone(), reason };
        let (rows, columns) = match info.shape[..] {
            [columns] => (1, columns),
            [rows, columns] => (rows, columns),
            _ => return Err(error(format!("has {} dimensions, the decoder reads one or two", info.shape.len()))),
        };
        let format = match info.dtype {
            Dtype::F32 => Format::F32,
            Dtype::F16 => Format::F16,
            Dtype::BF16 => Format::Bf16,
            other => return Err(error(format!("is stored as {other:?}, which the decoder does not read"))),
        };
        let (from, to) = info.data_offsets;
        let range = place(&path, &name, data + from as u64, to.saturating_sub(from) as u64, region.bytes().len())?;
        if format.row_bytes(columns).and_then(|b| b.checked_mul(rows)) != Some(range.len()) {
            return Err(error(format!("{rows} x {columns} numbers do not fill {} bytes", range.len())));
        }
        tensors.insert(own_name, TensorEntry { format, rows, columns, range });
    }
    apart(&path, &tensors)?;
    let c = &config;
    let shape = ModelConfig {
        layers: c.num_hidden_layers,
        width: c.hidden_size,
        heads: c.num_attention_heads.max(1),
        kv_heads: c.num_key_value_heads.unwrap_or(c.num_attention_heads),
        head_dim: c.head_dim.unwrap_or(c.hidden_size / c.num_attention_heads.max(1)),
        ffn_width: c.intermediate_size,
        vocab: c.vocab_size,
        trained_context: c.max_position_embeddings,
        rope_base: c.rope_theta.unwrap_or(10_000.0),
        // The transformers library pairs halves for both families; only GGUF permutes Llama's heads.
        rope_pairing: RopePairing::Halves,
        rms_eps: c.rms_norm_eps,
    };
    let rows = tensors.get("token_embd.weight").map_or(0, |table| table.rows);
    if rows != c.vocab_size {
        return Err(malformed(format!("its config.json says {} tokens, its table has {rows} rows", c.vocab_size)));
    }
    let vocabulary = vocabulary(folder, &config, rows)?;
    Ok(ModelFile { region, config: shape, tensors, vocabulary: Arc::new(vocabulary) })
}

fn vocabulary(folder: &Path, config: &Config, rows: usize) -> Result<Vocabulary, ModelError> {
    let path = folder.join("tokenizer.json");
    let TokenizerJson { model, added_tokens, pre_tokenizer } = json(&path)?;
    let added = added_tokens.iter().map(|t| (&t.content, t.id));
    // Some models have more rows than tokens. The file has the rows, so this takes no more than a few times its size.
    let mut tokens = vec![String::new(); rows];
    for (token, id) in model.vocab.iter().map(|(t, id)| (t, *id)).chain(added) {
        let slot = usize::try_from(id).ok().and_then(|id| tokens.get_mut(id));
        let Some(slot) = slot else {
            let reason = format!("token {token} has id {id}, past the vocabulary of {rows}");
            return Err(ModelError::Tokenizer { path, reason });
        };
        slot.clone_from(token);
    }
    let (control, whole): (Vec<&Added>, Vec<&Added>) = added_tokens.iter().partition(|t| t.special);
    let ids = |tokens: Vec<&Added>| tokens.iter().map(|t| t.id).collect::<Vec<u32>>();
    let (control, whole) = (ids(control), ids(whole));
    let merges = model
        .merges
        .into_iter()
        .map(|m| match m {
            Merge::Joined(m) => m,
            Merge::Pair(a, b) => format!("{a} {b}"),
        })
        .collect();
    let tokens = tokens.into_iter().collect();
    let end = match &config.eos_token_id {
        Some(Ids::One(id)) => vec![*id],
        Some(Ids::Many(ids)) => ids.clone(),
        None => Vec::new(),
    };
    let template = folder.join("tokenizer_config.json");
    let chat_template = if template.exists() { json::<TokenizerConfig>(&template)?.chat_template } else { None };
    // The file spells its rule out; Molt knows the rules by what only they contain.
    let rule = pre_tokenizer.to_string();
    let known =
        [(r"\\p{N}{1,3}", "llama-bpe"), (r"|\\p{N}|", "qwen2"), ("\"Digits\"", "smollm"), ("\"ByteLevel\"", "gpt-2")];
    let Some((_, name)) = known.iter().find(|(mark, _)| rule.contains(mark)) else {
        let reason = "its pre-tokenizer is none that Molt knows".to_owned();
        return Err(ModelError::Tokenizer { path, reason });
    };
    let pre_tokenizer = (*name).to_owned();
    let bos = config.bos_token_id;
    Ok(Vocabulary { tokens, merges, pre_tokenizer, control, whole, end, bos, chat_template })
}

fn json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let text = std::fs::read_to_string(path).map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
    serde_json::from_str(&text).map_err(|e| ModelError::Malformed { path: path.to_owned(), reason: e.to_string() })
}

/// `model.layers.3.self_attn.q_proj.weight` is `blk.3.attn_q.weight`; `None` for what the decoder does not use.
fn gguf_name(name: &str) -> Option<String> {
    let plain = match name {
        "model.embed_tokens.weight" => "token_embd.weight",
        "model.norm.weight" => "output_norm.weight",
        "lm_head.weight" => "output.weight",
        _ => {
            let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
            let (module, kind) = rest.rsplit_once('.')?;
            let own = match module {
                "self_attn.q_proj" => "attn_q",
                "self_attn.k_proj" => "attn_k",
                "self_attn.v_proj" => "attn_v",
                "self_attn.o_proj" => "attn_output",
                "mlp.gate_proj" => "ffn_gate",
                "mlp.up_proj" => "ffn_up",
                "mlp.down_proj" => "ffn_down",
                "input_layernorm" => "attn_norm",
                "post_attention_layernorm" => "ffn_norm",
                _ => return None,
            };
            return Some(format!("blk.{layer}.{own}.{kind}"));
        }
    };
    Some(plain.to_owned())
}
