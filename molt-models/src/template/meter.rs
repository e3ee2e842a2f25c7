//! How much memory a template has taken.
//!
//! Values in Jinja do not change once they are made, so what is alive was all made, and a sum over what was made bounds it.
//! A list is charged for its places and not for what stands in them, which was charged when it was made. What is
//! small in memory can still be endless when it is written out (a list that holds another ten times, that one the next ten
//! times), or too deep to be walked: every value is weighed as if it were written out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// What a template may make beside what comes of its input.
const BASE: usize = 512 << 10;
/// What it may make for each byte of its input: templates go over every message some ten times.
const PER_BYTE: usize = 32;
/// What a place in a list or map costs.
const PLACE: usize = 32;
/// How deep values may lie in one another. JSON from outside is half as deep at most.
const DEPTH: usize = 250;
/// Places that may be walked to weigh values: seconds.
const WALK: usize = 50_000_000;

/// The account of one rendering.
#[derive(Debug)]
pub(super) struct Meter {
    limit: usize,
    made: AtomicUsize,
    walked: AtomicUsize,
}

impl Meter {
    /// For a template that is given these values.
    pub(super) fn of_input(input: &[&Value]) -> Result<Arc<Self>, Error> {
        let endless = Self { limit: usize::MAX, made: AtomicUsize::new(0), walked: AtomicUsize::new(0) };
        let weights = input.iter().map(|value| endless.weigh(value)).collect::<Result<Vec<_>, _>>()?;
        let limit = BASE.saturating_add(weights.iter().sum::<usize>().saturating_mul(PER_BYTE));
        Ok(Arc::new(Self { limit, ..endless }))
    }

    fn refusal(&self, what: &str) -> Error {
        let reason = format!("takes more memory than the {} bytes that it may for its input: {what}", self.limit);
        Error::new(ErrorKind::InvalidOperation, reason)
    }

    /// Counts bytes that are about to be made.
    pub(super) fn charge(&self, bytes: usize, what: &str) -> Result<(), Error> {
        let made = self.made.load(Ordering::Relaxed).saturating_add(bytes);
        if made > self.limit {
            return Err(self.refusal(what));
        }
        self.made.store(made, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes that may still be made.
    pub(super) fn left(&self) -> usize {
        self.limit - self.made.load(Ordering::Relaxed)
    }

    /// What a value weighs when it is written out.
    pub(super) fn weigh(&self, value: &Value) -> Result<usize, Error> {
        let mut weight = 0;
        self.add_weight(value, 0, &mut weight)?;
        Ok(weight)
    }

    fn add_weight(&self, value: &Value, depth: usize, weight: &mut usize) -> Result<(), Error> {
        let deep = |what: &str| Error::new(ErrorKind::InvalidOperation, what.to_owned());
        *weight = weight.saturating_add(value.as_str().map_or(PLACE, str::len));
        if *weight > self.limit {
            return Err(self.refusal("a value"));
        }
        if self.walked.fetch_add(1, Ordering::Relaxed) > WALK {
            return Err(deep("goes over its values too often"));
        }
        let Some(object) = value.as_object() else { return Ok(()) };
        if depth > DEPTH {
            return Err(deep("puts values into one another too deeply"));
        }
        if depth > 0 && is_namespace(value) {
            return Err(deep("puts a namespace into another value"));
        }
        match object.repr() {
            ObjectRepr::Plain => {}
            ObjectRepr::Map => {
                for key in value.try_iter()? {
                    let under = value.get_item(&key)?;
                    self.add_weight(&key, depth + 1, weight)?;
                    self.add_weight(&under, depth + 1, weight)?;
                }
            }
            _ => {
                for item in value.try_iter()? {
                    self.add_weight(&item, depth + 1, weight)?;
                }
            }
        }
        Ok(())
    }

    /// Takes a value that was just made into the account. One that would be computed as it is read becomes a list, so that
    /// none is built on a thousand others.
    pub(super) fn keep(&self, value: Value) -> Result<Value, Error> {
        let Some(object) = value.as_object() else {
            self.charge(value.as_str().map_or(0, str::len), "a text")?;
            return Ok(value);
        };
        if object.is::<Numbers>() {
            return Ok(value);
        }
        let value = match value.kind() {
            ValueKind::Iterable => {
                let mut items = Vec::new();
                for item in value.try_iter()? {
                    self.charge(PLACE, "a list")?;
                    items.push(item);
                }
                Value::from(items)
            }
            _ => {
                self.charge(PLACE.saturating_mul(value.len().unwrap_or(1)), "a list or map")?;
                value
            }
        };
        self.weigh(&value)?;
        Ok(value)
    }
}

/// Namespaces are all that changes: one in another, or in itself, could be walked for ever.
pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// What `range` gives: numbers that take no memory.
#[derive(Debug)]
pub(super) struct Numbers {
    from: i64,
    step: i64,
    count: i64,
}

impl Numbers {
    /// As in Python, and at most a hundred thousand.
    pub(super) fn range(from: i64, to: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
        let wrong = |what: &str| Error::new(ErrorKind::InvalidOperation, format!("range {what}"));
        let (from, to) = to.map_or((0, from), |to| (from, to));
        let step = step.unwrap_or(1);
        let (way, stride) = (i128::from(to) - i128::from(from), i128::from(step));
        let count = match stride {
            0 => return Err(wrong("cannot go in steps of 0")),
            _ if way.signum() != stride.signum() => 0,
            _ => (way.abs() + stride.abs() - 1) / stride.abs(),
        };
        let count = i64::try_from(count).ok().filter(|count| *count <= 100_000);
        let count = count.ok_or_else(|| wrong("has more than 100,000 numbers"))?;
        Ok(Value::from_object(Self { from, step, count }))
    }
}

impl Object for Numbers {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = i64::try_from(key.clone()).ok().filter(|at| (0..self.count).contains(at))?;
        Some(Value::from(self.from + at * self.step))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(usize::try_from(self.count).unwrap_or(0))
    }
}
