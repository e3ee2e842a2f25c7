//! Bridges: the fitted maps for one ordered pair of models.
//!
//! A bridge file is a safetensors file. Its metadata holds the [`BridgeSpec`] and a digest of every tensor; it is tied
//! by hash to the files that both models' weights come from, and so serves every precision of the same weights.

mod features;
mod file;
mod fit;
mod spec;

pub use features::plain_keys_and_values;
pub use file::{Bridge, BridgeError, LayerMap};
pub use fit::{BridgeFit, FitError, Fitted, PlainMap, Sample};
pub use spec::{BridgeSpec, FORMAT, Residual, Shape};

pub(crate) use features::features;
