//! GGUF files (version 2 and 3): what their header claims, checked against the file.

use std::collections::BTreeMap;
use std::sync::Arc;

use molt_kv::region::FileRegion;

use crate::config::{ModelConfig, RopePairing};
use crate::error::ModelError;
use crate::file::header::Header;
use crate::file::{ModelFile, TensorEntry, apart, place};
use crate::kernels::Format;
use crate::tokenizer::Vocabulary;

pub(super) fn read(region: Arc<FileRegion>) -> Result<ModelFile, ModelError> {
    let path = region.path().to_owned();
    let malformed = |reason: String| ModelError::Malformed { path: path.clone(), reason };
    let in_header = |reason: String| malformed(format!("its GGUF header: {reason}"));
    let header = Header::read(region.bytes()).map_err(in_header)?;
    let family = header.text("general.architecture").map_err(in_header)?;
    let rope_pairing = match family {
        "qwen2" => RopePairing::Halves,
        "llama" => RopePairing::Neighbours,
        family => return Err(ModelError::Family { path: path.clone(), family: family.to_owned() }),
    };
    let mut tensors = BTreeMap::new();
    for (name, claim) in &header.tensors {
        let error = |reason| ModelError::Tensor { path: path.clone(), tensor: name.to_string(), reason };
        let dimensions = claim.dimensions.iter().map(|n| usize::try_from(*n)).collect::<Result<Vec<_>, _>>();
        let (rows, columns) = match dimensions.as_deref() {
            Ok([columns]) => (1, *columns),
            Ok([rows, columns]) => (*rows, *columns),
            _ => {
                return Err(error(format!(
                    "has the shape {:?}, the decoder reads one or two dimensions",
                    claim.dimensions
                )));
            }
        };
        let format = format(claim.format).ok_or_else(|| {
            error(format!("is stored in GGML's format {}, which the decoder does not read", claim.format))
        })?;
        let bytes = format
            .row_bytes(columns)
            .and_then(|row| row.checked_mul(rows))
            .ok_or_else(|| error(format!("{rows} x {columns} is no whole number of {format:?} blocks")))?;
        let start = header.data.saturating_add(claim.offset);
        let range = place(&path, name, start, bytes as u64, region.bytes().len())?;
        tensors.insert(name.to_string(), TensorEntry { format, rows, columns, range });
    }
    apart(&path, &tensors)?;
    let number = |key: &str| header.count(&format!("{family}.{key}")).map_err(in_header);
    let optional = |key: &str, default: usize| match header.has(&format!("{family}.{key}")) {
        true => number(key),
        false => Ok(default),
    };
    let (width, heads) = (number("embedding_length")?, number("attention.head_count")?.max(1));
    let vocab = tensors.get("token_embd.weight").map(|t| t.rows).ok_or_else(|| ModelError::Tensor {
        path: path.clone(),
        tensor: "token_embd.weight".to_owned(),
        reason: "is missing".to_owned(),
    })?;
    let config = ModelConfig {
        layers: number("block_count")?,
        width,
        heads,
        kv_heads: optional("attention.head_count_kv", heads)?,
        head_dim: optional("attention.key_length", width / heads)?,
        ffn_width: number("feed_forward_length")?,
        vocab,
        trained_context: number("context_length")?,
        rope_base: match header.has(&format!("{family}.rope.freq_base")) {
            true => header.float(&format!("{family}.rope.freq_base")).map_err(in_header)?,
            false => 10_000.0,
        },
        rope_pairing,
        rms_eps: header.float(&format!("{family}.attention.layer_norm_rms_epsilon")).map_err(in_header)?,
    };
    let scales = ["rope.scaling.factor", "rope.scale_linear"];
    if scales.iter().any(|key| header.has(&format!("{family}.{key}")))
        || tensors.contains_key("rope_freqs.weight")
        || optional("rope.dimension_count", config.head_dim)? != config.head_dim
    {
        return Err(malformed("it scales its rotary frequencies, which the decoder does not do".into()));
    }
    let vocabulary = vocabulary(&header).map_err(in_header)?;
    Ok(ModelFile { region, config, tensors, vocabulary: Arc::new(vocabulary) })
}

/// By the number that GGML gives it.
fn format(number: u32) -> Option<Format> {
    Some(match number {
        0 => Format::F32,
        1 => Format::F16,
        2 => Format::Q4_0,
        3 => Format::Q4_1,
        6 => Format::Q5_0,
        8 => Format::Q8_0,
        12 => Format::Q4K,
        14 => Format::Q6K,
        30 => Format::Bf16,
        _ => return None,
    })
}

fn vocabulary(header: &Header<'_>) -> Result<Vocabulary, String> {
    let model = header.text("tokenizer.ggml.model")?;
    if model != "gpt2" {
        return Err(format!("its tokenizer is {model}; Molt reads byte-level BPE (gpt2)"));
    }
    let texts = |key: &str| header.list(key)?.texts().ok_or_else(|| format!("{key} holds what is no text"));
    // 3 is a control token, 4 one that users defined: both are matched as a whole before merging.
    let types = header.list("tokenizer.ggml.token_type")?;
    let of_type = |wanted: i128| {
        let ids = types.integers().zip(0u32..).filter(move |(kind, _)| *kind == Some(wanted));
        ids.map(|(_, id)| id).collect::<Vec<u32>>()
    };
    let id = |key: &str| header.count(key).ok().and_then(|n| u32::try_from(n).ok());
    Ok(Vocabulary {
        tokens: texts("tokenizer.ggml.tokens")?,
        merges: texts("tokenizer.ggml.merges")?,
        pre_tokenizer: header.text("tokenizer.ggml.pre").unwrap_or("gpt-2").to_owned(),
        control: of_type(3),
        whole: of_type(4),
        end: id("tokenizer.ggml.eos_token_id").into_iter().collect(),
        bos: id("tokenizer.ggml.bos_token_id"),
        chat_template: header.text("tokenizer.chat_template").ok().map(str::to_owned),
    })
}
