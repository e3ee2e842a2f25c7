//! Trains the embedded ladder `pocket` from public-domain text and writes its two GGUF files.
//!
//! `cargo run --release -p molt-models --example train_pocket -- --text DIR --held-out DIR --out molt-models/ladders/pocket`
//!
//! Two decoders of the Qwen2 shape share one byte-pair vocabulary: `tier0` (served at f32 and, with int8 linear layers,
//! as tier1) and the smaller `tier2` with another depth, width and head width. Prints held-out bits per byte of both
//! beside `xz -9` on the same text. See `docs/pocket.md` for the text and for how long this takes.
#![allow(clippy::cast_possible_truncation, reason = "f64 averages are shown and applied as f32")]

use std::collections::HashMap;
use std::fs;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::loss::cross_entropy;
use candle_nn::optim::{AdamW, Optimizer as _, ParamsAdamW};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use molt_models::autograd::AutogradDecoder;
use molt_models::config::{ModelConfig, RopePairing};
use molt_models::pretokenize;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::{AddedToken, Tokenizer, TokenizerBuilder};

const END_OF_TEXT: &str = "<|endoftext|>";
const PRE_TOKENIZER: &str = "qwen2";
/// Messages are continued as prose: these models know no conversation.
const CHAT_TEMPLATE: &str =
    "<|endoftext|>{% for message in messages %}{{ message.content }}{% if not loop.last %}\n\n{% endif %}{% endfor %}";

#[derive(Parser)]
struct Args {
    /// Folder of .txt files to train on.
    #[arg(long)]
    text: PathBuf,
    /// Folder of .txt files that are only measured.
    #[arg(long)]
    held_out: PathBuf,
    /// Where the GGUF files go.
    #[arg(long)]
    out: PathBuf,
    /// Optimiser steps [default: 2400 for tier0, 1200 for tier2].
    #[arg(long)]
    steps: Option<usize>,
    /// Tokens in one optimiser step [default: 2048 for tier0, 1024 for tier2].
    #[arg(long)]
    batch_tokens: Option<usize>,
    /// Worker threads, each with a share of the batch.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Only train this tier (0 or 2).
    #[arg(long)]
    only: Option<usize>,
    /// Seed of weights and batches.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn shape(tier: usize, vocab: usize) -> ModelConfig {
    let (layers, width, heads, head_dim, ffn_width) =
        if tier == 0 { (5, 192, 6, 32, 448) } else { (3, 128, 8, 16, 320) };
    ModelConfig {
        layers,
        width,
        heads,
        kv_heads: 2,
        head_dim,
        ffn_width,
        vocab,
        trained_context: 512,
        rope_base: 10_000.0,
        rope_pairing: RopePairing::Halves,
        rms_eps: 1e-6,
    }
}

fn read_texts(folder: &Path) -> Result<Vec<String>> {
    let mut paths: Vec<_> = fs::read_dir(folder)
        .with_context(|| format!("cannot list {}", folder.display()))?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<Result<_, _>>()?;
    paths.retain(|p| p.extension().is_some_and(|e| e == "txt"));
    paths.sort();
    ensure!(!paths.is_empty(), "no .txt file in {}", folder.display());
    paths.iter().map(|p| fs::read_to_string(p).with_context(|| format!("cannot read {}", p.display()))).collect()
}

fn train_tokenizer(texts: &[String], vocab: usize) -> Result<Tokenizer> {
    let mut trainer = BpeTrainer::builder()
        .vocab_size(vocab)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut tokenizer = TokenizerBuilder::default()
        .with_model(BPE::default())
        .with_normalizer(None::<tokenizers::NormalizerWrapper>)
        .with_pre_tokenizer(pretokenize::by_name(PRE_TOKENIZER))
        .with_post_processor(None::<tokenizers::PostProcessorWrapper>)
        .with_decoder(Some(tokenizers::decoders::byte_level::ByteLevel::default()))
        .build()
        .map_err(anyhow::Error::msg)?;
    tokenizer.train(&mut trainer, texts.iter().map(String::as_str)).map_err(anyhow::Error::msg)?;
    Tokenizer::from_bytes(tokenizer.to_string(false).map_err(anyhow::Error::msg)?).map_err(anyhow::Error::msg)
}

fn encode(tokenizer: &Tokenizer, texts: &[String]) -> Result<Vec<Vec<u32>>> {
    let end = tokenizer.token_to_id(END_OF_TEXT).context("the vocabulary has no end-of-text token")?;
    texts
        .iter()
        .map(|text| {
            let ids = tokenizer.encode(text.as_str(), false).map_err(anyhow::Error::msg)?;
            Ok(std::iter::once(end).chain(ids.get_ids().iter().copied()).collect())
        })
        .collect()
}

fn init(config: &ModelConfig, seed: u64) -> Result<HashMap<String, Var>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut vars = HashMap::new();
    let mut add = |name: String, shape: &[usize], std: f32| -> Result<()> {
        let count = shape.iter().product();
        // Box-Muller, so that the weights do not depend on candle's own generator.
        let values: Vec<f32> = (0..count)
            .map(|_| {
                let (u, v): (f32, f32) = (rng.random_range(1e-7..1.0), rng.random());
                std * (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
            })
            .collect();
        let values = if std == 0.0 { vec![if name.ends_with("bias") { 0.0 } else { 1.0 }; count] } else { values };
        vars.insert(name, Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu)?)?);
        Ok(())
    };
    let c = config;
    let into = |fan_in: usize| (fan_in as f32).powf(-0.5);
    let residual = into(2 * c.layers);
    add("token_embd.weight".into(), &[c.vocab, c.width], 0.05)?;
    add("output_norm.weight".into(), &[c.width], 0.0)?;
    for l in 0..c.layers {
        for (part, rows, columns, scale) in [
            ("attn_q", c.q_width(), c.width, 1.0),
            ("attn_k", c.kv_width(), c.width, 1.0),
            ("attn_v", c.kv_width(), c.width, 1.0),
            ("attn_output", c.width, c.q_width(), residual),
            ("ffn_gate", c.ffn_width, c.width, 1.0),
            ("ffn_up", c.ffn_width, c.width, 1.0),
            ("ffn_down", c.width, c.ffn_width, residual),
        ] {
            add(format!("blk.{l}.{part}.weight"), &[rows, columns], into(columns) * scale)?;
            if ["attn_q", "attn_k", "attn_v"].contains(&part) {
                add(format!("blk.{l}.{part}.bias"), &[rows], 0.0)?;
            }
        }
        for part in ["attn_norm", "ffn_norm"] {
            add(format!("blk.{l}.{part}.weight"), &[c.width], 0.0)?;
        }
    }
    Ok(vars)
}

/// Summed loss in nats over `targets [batch, tokens]`, as a mean over all of them.
fn loss(decoder: &AutogradDecoder, windows: &[&[u32]]) -> Result<Tensor> {
    let tokens = windows[0].len() - 1;
    let flat = |skip: usize| -> Vec<u32> { windows.iter().flat_map(|w| w[skip..skip + tokens].to_vec()).collect() };
    let inputs = Tensor::from_vec(flat(0), (windows.len(), tokens), &Device::Cpu)?;
    let targets = Tensor::from_vec(flat(1), windows.len() * tokens, &Device::Cpu)?;
    let logits = decoder.forward(&inputs)?.reshape((windows.len() * tokens, ()))?;
    Ok(cross_entropy(&logits, &targets)?)
}

/// Steps and tokens a step.
fn effort(tier: usize, args: &Args) -> (usize, usize) {
    let (steps, tokens) = if tier == 0 { (2_400, 2_048) } else { (1_200, 1_024) };
    (args.steps.unwrap_or(steps), args.batch_tokens.unwrap_or(tokens))
}

fn train(config: &ModelConfig, stream: &[u32], args: &Args, tier: usize) -> Result<AutogradDecoder> {
    let (seed, (steps, batch_tokens)) = (args.seed + tier as u64, effort(tier, args));
    let mut names: Vec<_> = init(config, seed)?.into_iter().collect();
    names.sort_by(|a, b| a.0.cmp(&b.0));
    let (matrices, vectors): (Vec<_>, Vec<_>) = names.iter().cloned().partition(|(_, v)| v.dims().len() == 2);
    let decoder =
        AutogradDecoder::new(config.clone(), names.iter().map(|(n, v)| (n.clone(), v.as_tensor().clone())).collect());
    let peak = 4e-3;
    let params = |weight_decay| ParamsAdamW { lr: peak, beta1: 0.9, beta2: 0.97, eps: 1e-8, weight_decay };
    let mut optimisers = [
        AdamW::new(matrices.into_iter().map(|(_, v)| v).collect(), params(0.1))?,
        AdamW::new(vectors.into_iter().map(|(_, v)| v).collect(), params(0.0))?,
    ];
    let vars: Vec<Var> = names.into_iter().map(|(_, v)| v).collect();
    let mut rng = StdRng::seed_from_u64(seed ^ 0x5eed);
    let bar = ProgressBar::new(steps as u64)
        .with_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed}<{eta} {msg}")?);
    let (mut smooth, started) = (None::<f32>, std::time::Instant::now());
    for step in 0..steps {
        // Short windows first (they are cheaper), the full context for the last third.
        let tokens = if step * 3 < steps * 2 { config.trained_context / 2 } else { config.trained_context };
        let count = (batch_tokens / tokens).max(args.threads);
        let windows: Vec<&[u32]> = (0..count)
            .map(|_| {
                let at = rng.random_range(0..stream.len() - tokens - 1);
                &stream[at..at + tokens + 1]
            })
            .collect();
        let shares: Vec<_> = std::thread::scope(|scope| {
            let workers: Vec<_> = windows
                .chunks(count.div_ceil(args.threads))
                .map(|share| {
                    let decoder = &decoder;
                    scope.spawn(move || -> Result<_> {
                        let loss = loss(decoder, share)?;
                        Ok((loss.backward()?, loss.to_scalar::<f32>()?, share.len() as f64))
                    })
                })
                .collect();
            workers
                .into_iter()
                .map(|w| w.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?)
                .collect::<Result<_>>()
        })?;
        let mut shares = shares.into_iter();
        let (mut grads, mut mean, first) = shares.next().context("no batch")?;
        let weight = first / count as f64;
        mean *= weight as f32;
        let rest: Vec<_> = shares.collect();
        let mut square = 0.0;
        for var in &vars {
            let mut sum = (grads.get(var).context("a weight without a gradient")? * weight)?;
            for (other, _, n) in &rest {
                sum = (sum + (other.get(var).context("a weight without a gradient")? * (n / count as f64))?)?;
            }
            square += sum.sqr()?.sum_all()?.to_scalar::<f32>()?;
            grads.insert(var, sum);
        }
        for (_, loss, n) in &rest {
            mean += loss * (n / count as f64) as f32;
        }
        let norm = square.sqrt();
        if norm > 1.0 {
            for var in &vars {
                let clipped = (grads.get(var).context("a weight without a gradient")? / f64::from(norm))?;
                grads.insert(var, clipped);
            }
        }
        let done = step as f64 / steps as f64;
        let rate = peak
            * ((step + 1) as f64 / 150.0).min(1.0)
            * (0.02 + 0.98 * 0.5 * (1.0 + (std::f64::consts::PI * done).cos()));
        for optimiser in &mut optimisers {
            optimiser.set_learning_rate(rate);
            optimiser.step(&grads)?;
        }
        let shown = smooth.map_or(mean, |s| 0.98 * s + 0.02 * mean);
        smooth = Some(shown);
        bar.set_message(format!("loss {shown:.3}"));
        bar.inc(1);
        if step % 100 == 99 {
            println!("step {} loss {shown:.3} {:.0} s", step + 1, started.elapsed().as_secs_f64());
        }
    }
    bar.finish();
    Ok(decoder)
}

/// Bits per byte of the texts: every token is predicted from at least half a context (less at a text's start).
fn bits_per_byte(decoder: &AutogradDecoder, texts: &[Vec<u32>], bytes: usize) -> Result<f64> {
    let context = decoder.config().trained_context;
    let mut nats = 0.0;
    for ids in texts {
        let mut from = 0;
        while from + 1 < ids.len() {
            let start = from.saturating_sub(context / 2);
            let end = (start + context + 1).min(ids.len());
            let window = &ids[start..end];
            let inputs = Tensor::from_slice(&window[..window.len() - 1], (1, window.len() - 1), &Device::Cpu)?;
            let skip = from - start;
            let logits = decoder.forward(&inputs)?.squeeze(0)?.narrow(0, skip, window.len() - 1 - skip)?;
            let targets = Tensor::from_slice(&window[skip + 1..], window.len() - 1 - skip, &Device::Cpu)?;
            nats += f64::from(cross_entropy(&logits, &targets)?.to_scalar::<f32>()?) * (window.len() - 1 - skip) as f64;
            from = end - 1;
        }
    }
    Ok(nats / std::f64::consts::LN_2 / bytes as f64)
}

fn xz_bits_per_byte(texts: &[String]) -> Result<Option<f64>> {
    let all = texts.concat();
    let Ok(mut child) = Command::new("xz").args(["-9", "-c"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()
    else {
        return Ok(None);
    };
    let mut input = child.stdin.take().context("xz has no stdin")?;
    let text = all.clone();
    let writer = std::thread::spawn(move || input.write_all(text.as_bytes()));
    let output = child.wait_with_output()?;
    writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
    Ok(Some(output.stdout.len() as f64 * 8.0 / all.len() as f64))
}

fn sample(decoder: &AutogradDecoder, tokenizer: &Tokenizer, prompt: &str, tokens: usize, seed: u64) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut ids = encode(tokenizer, &[prompt.to_owned()])?.remove(0);
    for _ in 0..tokens {
        let input = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu)?;
        let row: Vec<f32> = decoder.forward(&input)?.squeeze(0)?.get(ids.len() - 1)?.to_vec1()?;
        let mut ranked: Vec<(usize, f32)> = row.into_iter().enumerate().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        ranked.truncate(20);
        let top = ranked[0].1;
        let weights: Vec<f32> = ranked.iter().map(|(_, l)| ((l - top) / 0.7).exp()).collect();
        let mut at = rng.random::<f32>() * weights.iter().sum::<f32>();
        let pick = weights
            .iter()
            .position(|w| {
                at -= w;
                at <= 0.0
            })
            .unwrap_or(0);
        ids.push(u32::try_from(ranked[pick].0)?);
    }
    tokenizer.decode(&ids, true).map_err(anyhow::Error::msg)
}

fn write_gguf(
    path: &Path,
    name: &str,
    decoder: &AutogradDecoder,
    weights: &[(String, Tensor)],
    tokenizer: &Tokenizer,
) -> Result<()> {
    use gguf_file::Value;
    let c = decoder.config();
    let json: serde_json::Value = serde_json::from_str(&tokenizer.to_string(false).map_err(anyhow::Error::msg)?)?;
    let mut vocab: Vec<(u64, String)> = json["model"]["vocab"]
        .as_object()
        .context("no vocabulary")?
        .iter()
        .map(|(token, id)| Ok((id.as_u64().context("an id that is no number")?, token.clone())))
        .collect::<Result<_>>()?;
    vocab.sort();
    let merges: Vec<Value> = json["model"]["merges"]
        .as_array()
        .context("no merges")?
        .iter()
        .map(|m| match m.as_array() {
            Some(pair) => {
                Value::String(format!("{} {}", pair[0].as_str().unwrap_or(""), pair[1].as_str().unwrap_or("")))
            }
            None => Value::String(m.as_str().unwrap_or("").to_owned()),
        })
        .collect();
    let end = tokenizer.token_to_id(END_OF_TEXT).context("no end-of-text token")?;
    let number = |n: usize| -> Result<Value> { Ok(Value::U32(u32::try_from(n)?)) };
    let text = |s: &str| Value::String(s.to_owned());
    let types = vocab.iter().map(|(id, _)| Value::I32(if *id == u64::from(end) { 3 } else { 1 })).collect();
    let metadata = vec![
        ("general.architecture", text("qwen2")),
        ("general.name", text(name)),
        ("general.license", text("apache-2.0")),
        ("qwen2.block_count", number(c.layers)?),
        ("qwen2.context_length", number(c.trained_context)?),
        ("qwen2.embedding_length", number(c.width)?),
        ("qwen2.feed_forward_length", number(c.ffn_width)?),
        ("qwen2.attention.head_count", number(c.heads)?),
        ("qwen2.attention.head_count_kv", number(c.kv_heads)?),
        ("qwen2.attention.layer_norm_rms_epsilon", Value::F32(c.rms_eps)),
        ("qwen2.rope.freq_base", Value::F32(c.rope_base)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text(PRE_TOKENIZER)),
        ("tokenizer.ggml.tokens", Value::Array(vocab.into_iter().map(|(_, t)| Value::String(t)).collect())),
        ("tokenizer.ggml.token_type", Value::Array(types)),
        ("tokenizer.ggml.merges", Value::Array(merges)),
        ("tokenizer.ggml.eos_token_id", Value::U32(end)),
        ("tokenizer.ggml.bos_token_id", Value::U32(end)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
        ("tokenizer.chat_template", text(CHAT_TEMPLATE)),
    ];
    let tensors: Vec<(&str, QTensor)> = weights
        .iter()
        .map(|(name, t)| {
            let kind = if t.dims().len() == 2 { GgmlDType::F16 } else { GgmlDType::F32 };
            Ok((name.as_str(), QTensor::quantize(&t.to_dtype(DType::F32)?, kind)?))
        })
        .collect::<Result<_>>()?;
    let mut file = BufWriter::new(fs::File::create(path)?);
    gguf_file::write(
        &mut file,
        &metadata.iter().map(|(k, v)| (*k, v)).collect::<Vec<_>>(),
        &tensors.iter().map(|(n, t)| (*n, t)).collect::<Vec<_>>(),
    )?;
    file.flush()?;
    Ok(())
}

fn main() -> Result<()> {
    let args = Args::parse();
    let (texts, held) = (read_texts(&args.text)?, read_texts(&args.held_out)?);
    let tokenizer = train_tokenizer(&texts, 3_072)?;
    let stream = encode(&tokenizer, &texts)?.concat();
    let held_ids = encode(&tokenizer, &held)?;
    let held_bytes: usize = held.iter().map(String::len).sum();
    let bytes: usize = texts.iter().map(String::len).sum();
    println!("{bytes} bytes of text, {} tokens, vocabulary {}", stream.len(), tokenizer.get_vocab_size(true));
    fs::create_dir_all(&args.out)?;
    let xz = xz_bits_per_byte(&held)?;
    for tier in [0, 2].into_iter().filter(|t| args.only.is_none_or(|only| only == *t)) {
        let config = shape(tier, tokenizer.get_vocab_size(true));
        let started = std::time::Instant::now();
        let decoder = train(&config, &stream, &args, tier)?;
        let mut weights: Vec<_> = decoder.weights().map(|(n, t)| (n.clone(), t.clone())).collect();
        weights.sort_by(|a, b| a.0.cmp(&b.0));
        let path = args.out.join(format!("pocket-tier{tier}.gguf"));
        write_gguf(&path, &format!("Molt pocket tier{tier}"), &decoder, &weights, &tokenizer)?;
        let bits = bits_per_byte(&decoder, &held_ids, held_bytes)?;
        let xz = xz.map_or("not installed".to_owned(), |x| format!("{x:.3}"));
        println!(
            "tier{tier}: {bits:.3} bits per byte held out (xz -9: {xz}), {:.0} s",
            started.elapsed().as_secs_f64()
        );
        println!("{}\n", sample(&decoder, &tokenizer, "The people of the United States", 150, args.seed)?);
    }
    Ok(())
}
