//! What must hold before any figure counts: that a cache which should change nothing changes nothing, that the rotation
//! is what is believed of it, and that caches which should ruin the continuation ruin it.

use molt_kv::cache::KvCache;
use molt_kv::decoder::{Decoder as _, StopFlag};
use molt_kv::keepsake::Keepsake;
use molt_kv::rope::Turn;
use molt_models::Model;
use molt_scheduler::units::Tokens;
use serde::Serialize;

use super::error::EvalError;
use super::metrics::{MIDDLE, Positions};
use super::pair::Pair;
use super::setting::Setting;
use super::windows::{Window, windows};

/// Texts on which the gates are tried.
const TEXTS: usize = 2;
/// Tokens before the seam, at most: the controls are as plain at short contexts.
const CONTEXT: usize = 256;
/// How many times worse than the carried cache each control must be, and how far from the native one at least.
const WORSE: f64 = 2.0;
const APART: f64 = 0.005;
/// Relative errors of a key turned back and forth, and of the same token's key at two places: a rounding to f16 each.
const TURNED: f64 = 1e-5;
const SAME_KEY: f64 = 1e-2;

/// A cache that should ruin the continuation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Control {
    /// The native cache of another text.
    OtherText,
    /// All keys and values zero.
    Zeros,
    /// The native keys, turned to positions in reverse.
    Permuted,
    /// No cache at all.
    NoContext,
}

impl Control {
    const ALL: [Self; 4] = [Self::OtherText, Self::Zeros, Self::Permuted, Self::NoContext];

    fn gate(self) -> &'static str {
        match self {
            Self::OtherText => "another text's cache is much worse",
            Self::Zeros => "a cache of zeros is much worse",
            Self::Permuted => "a cache with permuted positions is much worse",
            Self::NoContext => "no context is much worse",
        }
    }

    /// The spoilt cache; `own` is the native one.
    fn spoil(self, pair: &Pair, own: &KvCache, other: &[u32]) -> Result<KvCache, EvalError> {
        let empty = || KvCache::new(own.shape(), own.limit(), &pair.ledger);
        match self {
            Self::NoContext => Ok(empty()?),
            Self::OtherText => {
                let limit = usize::from(own.limit());
                Ok(pair.read(&pair.destination, &other[..own.len().min(other.len())], limit)?.0)
            }
            Self::Zeros | Self::Permuted => {
                let mut cache = empty()?;
                for slot in own.slots() {
                    cache.append_at(&[*slot], slot.provenance)?;
                }
                let (rope, width) = (pair.destination.rope(), own.shape().kv_width());
                for layer in 0..own.shape().layers {
                    let mut keys = vec![0.0; own.len() * width];
                    let mut values = keys.clone();
                    if self == Self::Permuted {
                        keys = own.keys(layer).to_f32();
                        values = own.values(layer).to_f32();
                        let turned = keys.chunks_exact_mut(width).zip(own.slots()).zip(own.slots().iter().rev());
                        for ((key, slot), place) in turned {
                            rope.turn(key, slot.position, Turn::Back);
                            rope.turn(key, place.position, Turn::Forward);
                        }
                    }
                    cache.write(layer, 0, &keys, &values);
                }
                Ok(cache)
            }
        }
    }
}

/// What the gates found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gates {
    /// The largest divergence at any position after the destination's own cache was saved and restored.
    pub own_cache_kl_max: f64,
    /// Relative error of keys turned back and forth.
    pub turned_error: f64,
    /// Relative difference between first-layer keys of the same token at two places, turned back; and before that.
    pub same_key_error: (f64, f64),
    /// Mean divergence over 64 positions of the cache as it really comes over.
    pub carried_kl_64: f64,
    /// The same of each control.
    pub controls: Vec<(Control, f64)>,
}

impl Gates {
    /// Tries the gates of a pair on documents of tokens.
    pub(super) fn try_on(pair: &Pair, documents: &[(String, Vec<u32>)], context: usize) -> Result<Self, EvalError> {
        let context = context.min(CONTEXT);
        let texts = windows(documents, TEXTS, context + MIDDLE + 1);
        let mut gates = Self {
            own_cache_kl_max: 0.0,
            turned_error: 0.0,
            same_key_error: (0.0, f64::INFINITY),
            carried_kl_64: 0.0,
            controls: Control::ALL.map(|control| (control, 0.0)).to_vec(),
        };
        let share = 1.0 / texts.len().max(1) as f64;
        for (at, window) in texts.iter().enumerate() {
            let mut other = texts[(at + 1) % texts.len()].tokens.clone();
            if texts.len() == 1 {
                other.reverse();
            }
            gates.add(pair, window, context, &other, share)?;
        }
        gates.check(&pair.name())?;
        Ok(gates)
    }

    fn add(
        &mut self,
        pair: &Pair,
        window: &Window,
        context: usize,
        other: &[u32],
        share: f64,
    ) -> Result<(), EvalError> {
        let text = &window.tokens;
        let width = pair.destination.width();
        let (_, native) = pair.read(&pair.destination, &text[..context + MIDDLE], text.len())?;
        let native = &native[context * width..];
        let after = |mut cache: KvCache| -> Result<Positions, EvalError> {
            let hidden = pair.destination.read_all(&text[context..context + MIDDLE], &mut cache, &StopFlag::new())?;
            Ok(pair.compare(native, &hidden, &text[context + 1..=context + MIDDLE]))
        };
        let (mut own, _) = pair.read(&pair.destination, &text[..context], text.len())?;
        let (source, _) = pair.read(&pair.source, &text[..context], text.len())?;
        for (model, cache) in [(&pair.destination, &own), (&pair.source, &source)] {
            self.turn(model, cache);
        }
        let mut kept = Keepsake::save(&own, pair.destination.source(), &std::env::temp_dir())?;
        let restored = after(kept.restore(Tokens::from(text.len()), &pair.ledger)?)?;
        self.own_cache_kl_max = worse(self.own_cache_kl_max, restored.kl_max());
        for (control, kl) in &mut self.controls {
            *kl += share * after(control.spoil(pair, &own, other)?)?.kl_mean(MIDDLE);
        }
        let setting = if pair.bridge.is_some() { Setting::Balanced } else { Setting::Keepsake };
        let (carried, _) = setting.bring(pair, &source, &mut own)?;
        self.carried_kl_64 += share * after(carried)?.kl_mean(MIDDLE);
        Ok(())
    }

    /// Turns cached keys back and forth. In the first layer a key before rotation depends on nothing but its token, so
    /// the same token's keys must agree once they are turned back from wherever they stood.
    fn turn(&mut self, model: &Model, cache: &KvCache) {
        let (rope, width) = (model.rope(), cache.shape().kv_width());
        let keys = cache.keys(0).to_f32();
        let mut back = keys.clone();
        let mut forth = Vec::new();
        for (key, slot) in back.chunks_exact_mut(width).zip(cache.slots()) {
            rope.turn(key, slot.position, Turn::Back);
            let mut again = key.to_vec();
            rope.turn(&mut again, slot.position, Turn::Forward);
            forth.extend(again);
        }
        self.turned_error = worse(self.turned_error, apart(&keys, &forth));
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for (at, slot) in cache.slots().iter().enumerate() {
            if let Some(before) = cache.slots()[..at].iter().position(|earlier| earlier.token == slot.token) {
                first.push(before);
                second.push(at);
            }
        }
        let gather = |keys: &[f32], slots: &[usize]| -> Vec<f32> {
            slots.iter().flat_map(|at| &keys[at * width..(at + 1) * width]).copied().collect()
        };
        let error = |keys: &[f32]| apart(&gather(keys, &first), &gather(keys, &second));
        let (turned_back, as_cached) = self.same_key_error;
        self.same_key_error = (worse(turned_back, error(&back)), as_cached.min(error(&keys)));
    }

    /// The first gate that fails, as an error.
    fn check(&self, pair: &str) -> Result<(), EvalError> {
        let fails = |gate, found: String| Err(EvalError::Gate { pair: pair.to_owned(), gate, found });
        // Every comparison is written so that what is no number fails.
        if self.own_cache_kl_max != 0.0 {
            return fails("its own cache is native", format!("divergence {:e}", self.own_cache_kl_max));
        }
        let ok = self.turned_error <= TURNED;
        if !ok {
            return fails(
                "keys turned back and forth are themselves",
                format!("relative error {:e}", self.turned_error),
            );
        }
        let (turned_back, as_cached) = self.same_key_error;
        let ok = turned_back <= SAME_KEY && as_cached > 2.0 * turned_back;
        if !ok {
            let found = format!("they differ by {turned_back:e}, as cached by {as_cached:e}");
            return fails("the same token's first keys agree when turned back", found);
        }
        for (control, kl) in &self.controls {
            let ok = *kl >= WORSE * self.carried_kl_64 && *kl >= APART;
            if !ok {
                let found = format!("kl over 64 tokens {kl:.4}, carried {:.4}", self.carried_kl_64);
                return fails(control.gate(), found);
            }
        }
        Ok(())
    }
}

fn worse(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

/// The root mean square of the difference over that of the first; no number where there is nothing to compare.
fn apart(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x).powi(2);
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (difference / a.iter().map(|a| square(*a)).sum::<f64>()).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gate_can_fail_and_says_which_it_is() {
        let good = || Gates {
            own_cache_kl_max: 0.0,
            turned_error: 1e-7,
            same_key_error: (1e-4, 0.5),
            carried_kl_64: 0.1,
            controls: Control::ALL.map(|control| (control, 1.0)).to_vec(),
        };
        let check = |spoil: &dyn Fn(&mut Gates), named: Option<&str>| {
            let mut gates = good();
            spoil(&mut gates);
            let found = gates.check("tier0:tier1").err().map(|e| e.to_string());
            match (named, &found) {
                (None, None) => {}
                (Some(named), Some(found)) if found.contains(named) && found.contains("tier0:tier1") => {}
                _ => panic!("{named:?} expected, {found:?} found"),
            }
        };
        check(&|_| (), None);
        check(&|g| g.own_cache_kl_max = 1e-12, Some("own cache"));
        check(&|g| g.own_cache_kl_max = f64::NAN, Some("own cache"));
        check(&|g| g.turned_error = 1e-3, Some("back and forth"));
        check(&|g| g.same_key_error = (0.3, 0.5), Some("same token"));
        check(&|g| g.same_key_error = (1e-4, 1e-4), Some("same token"));
        check(&|g| g.same_key_error = (f64::NAN, 0.5), Some("same token"));
        check(&|g| g.carried_kl_64 = 0.6, Some("another text"));
        check(&|g| g.controls[1].1 = 0.1, Some("zeros"));
        check(&|g| g.controls[2].1 = f64::NAN, Some("permuted"));
        check(&|g| (g.carried_kl_64, g.controls[3].1) = (0.0, 0.001), Some("no context"));
    }
}
