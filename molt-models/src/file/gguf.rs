//! GGUF headers (version 2 and 3), read by candle and checked against the file.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::sync::Arc;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use molt_kv::region::FileRegion;

use crate::config::{ModelConfig, RopePairing};
use crate::error::ModelError;
use crate::file::{ModelFile, TensorEntry, place};
use crate::kernels::Format;
use crate::tokenizer::Vocabulary;

pub(super) fn read(region: Arc<FileRegion>) -> Result<ModelFile, ModelError> {
    let path = region.path().to_owned();
    let malformed = |reason: String| ModelError::Malformed { path: path.clone(), reason };
    // The reader divides by it.
    let no_alignment = b"general.alignment\x04\0\0\0\0\0\0\0";
    let header_part = &region.bytes()[..region.bytes().len().min(1 << 20)];
    if header_part.windows(no_alignment.len()).any(|w| w == no_alignment) {
        return Err(malformed("its general.alignment is 0".into()));
    }
    let content =
        Content::read(&mut Cursor::new(region.bytes())).map_err(|e| malformed(format!("its GGUF header: {e}")))?;
    let header = Header { content: &content, error: &malformed };
    let family = header.text("general.architecture")?;
    let rope_pairing = match family {
        "qwen2" => RopePairing::Halves,
        "llama" => RopePairing::Neighbours,
        family => return Err(ModelError::Family { path: path.clone(), family: family.to_owned() }),
    };
    let mut tensors = BTreeMap::new();
    for (name, info) in &content.tensor_infos {
        let error = |reason| ModelError::Tensor { path: path.clone(), tensor: name.clone(), reason };
        let (rows, columns) = match info.shape.dims() {
            [columns] => (1, *columns),
            [rows, columns] => (*rows, *columns),
            dims => return Err(error(format!("has {} dimensions, the decoder reads one or two", dims.len()))),
        };
        let format = format(info.ggml_dtype)
            .ok_or_else(|| error(format!("is stored as {:?}, which the decoder does not read", info.ggml_dtype)))?;
        let bytes = format
            .row_bytes(columns)
            .and_then(|row| row.checked_mul(rows))
            .ok_or_else(|| error(format!("{rows} x {columns} is no whole number of {format:?} blocks")))?;
        let start = content.tensor_data_offset.saturating_add(info.offset);
        let range = place(&path, name, start, bytes as u64, region.bytes().len())?;
        tensors.insert(name.clone(), TensorEntry { format, rows, columns, range });
    }
    let number = |key: &str| header.number(&format!("{family}.{key}"));
    let optional = |key: &str, default: usize| match content.metadata.contains_key(&format!("{family}.{key}")) {
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
        rope_base: match content.metadata.contains_key(&format!("{family}.rope.freq_base")) {
            true => header.float(&format!("{family}.rope.freq_base"))?,
            false => 10_000.0,
        },
        rope_pairing,
        rms_eps: header.float(&format!("{family}.attention.layer_norm_rms_epsilon"))?,
    };
    let scales = ["rope.scaling.factor", "rope.scale_linear"];
    if scales.iter().any(|key| content.metadata.contains_key(&format!("{family}.{key}")))
        || tensors.contains_key("rope_freqs.weight")
        || optional("rope.dimension_count", config.head_dim)? != config.head_dim
    {
        return Err(malformed("it scales its rotary frequencies, which the decoder does not do".into()));
    }
    let vocabulary = vocabulary(&header)?;
    Ok(ModelFile { region, config, tensors, vocabulary })
}

fn format(dtype: GgmlDType) -> Option<Format> {
    Some(match dtype {
        GgmlDType::F32 => Format::F32,
        GgmlDType::F16 => Format::F16,
        GgmlDType::BF16 => Format::Bf16,
        GgmlDType::Q4_0 => Format::Q4_0,
        GgmlDType::Q4_1 => Format::Q4_1,
        GgmlDType::Q5_0 => Format::Q5_0,
        GgmlDType::Q8_0 => Format::Q8_0,
        GgmlDType::Q4K => Format::Q4K,
        GgmlDType::Q6K => Format::Q6K,
        _ => return None,
    })
}

fn vocabulary(header: &Header<'_>) -> Result<Vocabulary, ModelError> {
    let model = header.text("tokenizer.ggml.model")?;
    if model != "gpt2" {
        return Err((header.error)(format!("its tokenizer is {model}; Molt reads byte-level BPE (gpt2)")));
    }
    let list = |key: &str| -> Result<&Vec<Value>, ModelError> {
        header.value(key)?.to_vec().map_err(|_| (header.error)(format!("{key} is no list")))
    };
    let strings = |key: &str| -> Result<Vec<String>, ModelError> {
        let text = |v: &Value| v.to_string().cloned().map_err(|_| (header.error)(format!("{key} holds no text")));
        list(key)?.iter().map(text).collect()
    };
    // 3 is a control token, 4 one that users defined: both are matched as a whole before merging.
    let types = list("tokenizer.ggml.token_type")?;
    let of_type = |wanted: i32| {
        let ids = types.iter().zip(0u32..).filter(move |(kind, _)| kind.to_i32().is_ok_and(|kind| kind == wanted));
        ids.map(|(_, id)| id).collect::<Vec<u32>>()
    };
    let id = |key: &str| header.number(key).ok().and_then(|n| u32::try_from(n).ok());
    Ok(Vocabulary {
        tokens: strings("tokenizer.ggml.tokens")?,
        merges: strings("tokenizer.ggml.merges")?,
        pre_tokenizer: header.text("tokenizer.ggml.pre").unwrap_or("gpt-2").to_owned(),
        control: of_type(3),
        whole: of_type(4),
        end: id("tokenizer.ggml.eos_token_id").into_iter().collect(),
        bos: id("tokenizer.ggml.bos_token_id"),
        chat_template: header.text("tokenizer.chat_template").ok().map(str::to_owned),
    })
}

struct Header<'a> {
    content: &'a Content,
    error: &'a dyn Fn(String) -> ModelError,
}

impl<'a> Header<'a> {
    fn value(&self, key: &str) -> Result<&'a Value, ModelError> {
        self.content.metadata.get(key).ok_or_else(|| (self.error)(format!("its header has no {key}")))
    }

    fn text(&self, key: &str) -> Result<&'a str, ModelError> {
        let value = self.value(key)?.to_string().map_err(|_| (self.error)(format!("{key} is no text")))?;
        Ok(value.as_str())
    }

    fn number(&self, key: &str) -> Result<usize, ModelError> {
        let value = self.value(key)?;
        let number = value.to_u64().or_else(|_| value.to_u32().map(u64::from)).ok();
        number.and_then(|n| usize::try_from(n).ok()).ok_or_else(|| (self.error)(format!("{key} is no count")))
    }

    fn float(&self, key: &str) -> Result<f32, ModelError> {
        self.value(key)?.to_f32().map_err(|_| (self.error)(format!("{key} is no number")))
    }
}
