//! Where tenants and sequences live: numbered slots that are used again, each with a generation, walked in slot order.
//!
//! Slot order, not a hash, decides every walk over the state, so that the same state always gives the same plan.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Slots with generations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Puts a value into a free slot; `make` is told the slot and its generation.
    pub(crate) fn insert<Id: Copy>(&mut self, name: impl Fn(u32, u32) -> Id, make: impl FnOnce(Id) -> T) -> Id {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, value: None });
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let Some(entry) = self.slots.get_mut(index(slot)) else {
            // Only past 2^32 slots, which the queues' and the admission's limits keep far away.
            return name(slot, u32::MAX);
        };
        let id = name(slot, entry.generation);
        entry.value = Some(make(id));
        id
    }

    /// The value, where slot and generation still name it.
    pub(crate) fn get(&self, (slot, generation): (u32, u32)) -> Option<&T> {
        let entry = self.slots.get(index(slot))?;
        if entry.generation == generation { entry.value.as_ref() } else { None }
    }

    /// The value, to change.
    pub(crate) fn get_mut(&mut self, (slot, generation): (u32, u32)) -> Option<&mut T> {
        let entry = self.slots.get_mut(index(slot))?;
        if entry.generation == generation { entry.value.as_mut() } else { None }
    }

    /// Takes the value out. A slot whose generations are used up is never used again.
    pub(crate) fn remove(&mut self, (slot, generation): (u32, u32)) -> Option<T> {
        let entry = self.slots.get_mut(index(slot))?;
        if entry.generation != generation {
            return None;
        }
        let value = entry.value.take()?;
        if let Some(next) = entry.generation.checked_add(1) {
            entry.generation = next;
            self.free.push(slot);
        }
        Some(value)
    }

    /// All values in slot order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }

    /// All values in slot order, to change.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.value.as_mut())
    }

    /// Slots there have ever been at once.
    pub(crate) fn width(&self) -> usize {
        self.slots.len()
    }
}

fn index(slot: u32) -> usize {
    usize::try_from(slot).unwrap_or(usize::MAX)
}
