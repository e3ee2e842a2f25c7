//! Conversations that have ended: their caches are kept for the next turn, whose prompt begins as they do.
//!
//! What is kept harms nobody by going, so it goes before any lever is used: the scheduler plans as if it were not there,
//! and the engine keeps no more than the plan leaves of the budget. It never crosses tenants, nor the users of a tenant.

use std::collections::VecDeque;

use molt_kv::cache::{KvCache, Provenance, Slot};
use molt_kv::decoder::Decoder as _;
use molt_scheduler::units::{Bytes, RungIdx, Tokens};
use molt_scheduler::{SequenceId, TenantId};

use crate::engine::Engine;
use crate::engine::left::Left;
use crate::engine::sequence::Sequence;

/// Whose a conversation is: a tenant's, and of the user where that is known.
pub(super) type Owner = (TenantId, Option<u32>);

/// Tokens that make a prefix worth a copy.
const WORTH: usize = 16;

impl Engine {
    /// Keeps what an ended answer leaves.
    pub(super) fn keep_prefix(&mut self, ended: Sequence) {
        if let Some(cache) = ended.cache.filter(|_| ended.reuse && !ended.mixed) {
            self.prefixes.keep(ended.owner, ended.rung, cache);
        }
    }

    /// Gives the oldest back until the rest fits beside a plan.
    pub(super) fn fit_prefixes(&mut self, spare: Bytes) {
        while self.prefixes.bytes() > spare && self.prefixes.forget_oldest() {}
        self.spare = spare - self.prefixes.bytes();
    }

    /// Begins a sequence that is let in with what its prompt has in common with an earlier conversation, where there is
    /// memory for a copy. Returns the tokens that need not be read again.
    pub(super) fn reuse_prefix(&mut self, id: SequenceId, rung: RungIdx) -> Tokens {
        let fresh = |found: &&mut Sequence| found.reuse && found.cache.is_none() && found.read == 0;
        let Some(sequence) = self.sequences.get_mut(&id).filter(fresh) else {
            return Tokens::ZERO;
        };
        // Where the load has failed the sequence waits again, and has nothing.
        let Some(loaded) = self.loaded.get(&rung) else { return Tokens::ZERO };
        let found = self.prefixes.find(sequence.owner, rung, &sequence.tokens);
        let in_memory = found.map_or(0, |(_, common)| common);
        let left = self.prefixes.find_left(sequence.owner, rung, &sequence.tokens);
        if let Some((at, common)) = left
            && common > in_memory
            && self.prefixes.left[at].kept.shape() == loaded.model.cache_shape()
            && self.reuse_left(id, at, common)
        {
            return Tokens::from(common);
        }
        // The same once more, for what was left may be gone now.
        let (Some(sequence), Some(loaded)) = (self.sequences.get_mut(&id), self.loaded.get(&rung)) else {
            return Tokens::ZERO;
        };
        let Some((kept, common)) = self.prefixes.find(sequence.owner, rung, &sequence.tokens) else {
            return Tokens::ZERO;
        };
        let bytes = kept.shape().charge(common);
        if kept.shape() != loaded.model.cache_shape() || bytes > self.spare {
            return Tokens::ZERO;
        }
        // Without address space for it, it is read like any other.
        let Ok(copy) = kept.prefix(common, sequence.limit(), &self.ledger) else { return Tokens::ZERO };
        sequence.cache = Some(copy);
        sequence.read = common;
        self.spare -= bytes;
        Tokens::from(common)
    }
}

/// A conversation that has ended.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) owner: Owner,
    pub(super) rung: RungIdx,
    /// All exact, and without gaps.
    pub(super) cache: KvCache,
}

/// How many tokens a prompt has in common with a conversation. The prompt's last token is read in any case: what comes after it
/// is what was asked for.
fn common(slots: &[Slot], prompt: &[u32]) -> usize {
    let same = slots.iter().zip(prompt).take_while(|(slot, token)| slot.token == **token).count();
    same.min(prompt.len().saturating_sub(1))
}

/// How many tokens at the front are what a native read of them makes.
pub(super) fn native(slots: &[Slot]) -> usize {
    let native = |(slot, position): &(&Slot, u32)| slot.provenance == Provenance::Exact && slot.position == *position;
    slots.iter().zip(0u32..).take_while(native).count()
}

/// All that is kept, oldest first.
#[derive(Debug)]
pub(super) struct Prefixes {
    pub(super) kept: VecDeque<Kept>,
    /// What an earlier daemon has left, newest first; it takes no memory.
    pub(super) left: Vec<Left>,
    /// Most conversations of one owner.
    each: usize,
}

impl Prefixes {
    /// Keeps so many conversations of each owner.
    pub(super) fn new(each: usize) -> Self {
        Self { kept: VecDeque::new(), left: Vec::new(), each }
    }

    /// Whether anything is kept at all.
    pub(super) fn keeps(&self) -> bool {
        self.each > 0
    }

    /// Bytes in use, as the books have them.
    pub(super) fn bytes(&self) -> Bytes {
        self.kept.iter().map(|kept| kept.cache.shape().charge(kept.cache.len())).sum()
    }

    /// Takes over the cache of an answer that has ended, as far as it is what a native read of its tokens makes.
    pub(super) fn keep(&mut self, owner: Owner, rung: RungIdx, mut cache: KvCache) {
        let exact = native(cache.slots());
        if self.each == 0 || exact < WORTH {
            return;
        }
        cache.truncate(exact);
        let tokens: Vec<u32> = cache.slots().iter().map(|slot| slot.token).collect();
        // An earlier turn of the same conversation says nothing more.
        let earlier = |held: &[Slot]| {
            held.len() <= tokens.len() && held.iter().zip(&tokens).all(|(slot, token)| slot.token == *token)
        };
        self.kept.retain(|kept| kept.owner != owner || kept.rung != rung || !earlier(kept.cache.slots()));
        self.left.retain(|left| left.owner != owner || left.rung != rung || !earlier(left.kept.slots()));
        if self.kept.iter().filter(|kept| kept.owner == owner).count() >= self.each
            && let Some(oldest) = self.kept.iter().position(|kept| kept.owner == owner)
        {
            self.kept.remove(oldest);
        }
        self.kept.push_back(Kept { owner, rung, cache });
    }

    /// The owner's conversation on that rung which has most in common with a prompt, and how many tokens that is.
    pub(super) fn find(&self, owner: Owner, rung: RungIdx, prompt: &[u32]) -> Option<(&KvCache, usize)> {
        let own = self.kept.iter().filter(|kept| kept.owner == owner && kept.rung == rung);
        let (kept, common) =
            own.map(|kept| (kept, common(kept.cache.slots(), prompt))).max_by_key(|(_, common)| *common)?;
        (common >= WORTH).then_some((&kept.cache, common))
    }

    /// The same of what an earlier daemon has left: which, and how many tokens.
    fn find_left(&self, owner: Owner, rung: RungIdx, prompt: &[u32]) -> Option<(usize, usize)> {
        let own = self.left.iter().enumerate().filter(|(_, left)| left.owner == owner && left.rung == rung);
        let best = own.map(|(at, left)| (at, common(left.kept.slots(), prompt))).max_by_key(|(_, common)| *common)?;
        (best.1 >= WORTH).then_some(best)
    }

    /// Gives the oldest back. False where nothing is kept.
    pub(super) fn forget_oldest(&mut self) -> bool {
        self.kept.pop_front().is_some()
    }

    /// A tenant has left.
    pub(super) fn forget(&mut self, tenant: TenantId) {
        self.kept.retain(|kept| kept.owner.0 != tenant);
        self.left.retain(|left| left.owner.0 != tenant);
    }
}

#[cfg(test)]
mod tests {
    use molt_kv::cache::CacheShape;
    use molt_kv::keepsake::Keepsake;
    use molt_kv::ledger::{Kind, Ledger};
    use molt_kv::numbers::CachePrecision;
    use serde_json::json;

    use super::*;

    const SHAPE: CacheShape = CacheShape { layers: 1, kv_heads: 1, head_dim: 4, precision: CachePrecision::F16 };

    fn cache(ledger: &Ledger, tokens: &[u32]) -> KvCache {
        let mut cache = KvCache::new(SHAPE, Tokens::new(1_000), ledger).unwrap();
        cache.append(tokens).unwrap();
        cache
    }

    #[test]
    fn what_an_earlier_daemon_has_left_is_found_until_it_says_nothing_more() {
        let (ledger, mut prefixes, folder) = (Ledger::new(), Prefixes::new(2), tempfile::tempdir().unwrap());
        let tenant: TenantId = serde_json::from_value(json!({"slot": 0, "generation": 0})).unwrap();
        let (mail, other, top) = ((tenant, Some(1)), (tenant, Some(2)), RungIdx::TOP);
        let talk = |from: u32, tokens: u32| -> Vec<u32> { (from..from + tokens).collect() };
        for from in [0, 500] {
            let kept = Keepsake::save(&cache(&ledger, &talk(from, 40)), "abc", folder.path()).unwrap();
            prefixes.left.push(Left { owner: mail, rung: top, kept });
        }
        assert_eq!(prefixes.bytes(), Bytes::ZERO, "it takes no memory");
        let check = |prefixes: &Prefixes, owner, rung, prompt: &[u32], expected: Option<(usize, usize)>| {
            assert_eq!(prefixes.find_left(owner, rung, prompt), expected);
        };
        check(&prefixes, mail, top, &talk(0, 60), Some((0, 40)));
        check(&prefixes, mail, top, &talk(500, 30), Some((1, 29)));
        check(&prefixes, mail, top, &talk(0, 10), None);
        check(&prefixes, mail, RungIdx::new(1), &talk(0, 60), None);
        check(&prefixes, other, top, &talk(0, 60), None);
        // Its next turn has ended; the other conversation may still go on.
        prefixes.keep(mail, top, cache(&ledger, &talk(0, 50)));
        check(&prefixes, mail, top, &talk(0, 60), None);
        check(&prefixes, mail, top, &talk(500, 60), Some((0, 40)));
        prefixes.forget(tenant);
        check(&prefixes, mail, top, &talk(500, 60), None);
    }

    #[test]
    fn a_prompt_finds_what_begins_as_it_does() {
        let (ledger, mut prefixes) = (Ledger::new(), Prefixes::new(2));
        let tenant =
            |slot: u32| -> TenantId { serde_json::from_value(json!({"slot": slot, "generation": 0})).unwrap() };
        let (mail, notes) = ((tenant(0), Some(1)), (tenant(1), Some(1)));
        let (top, below) = (RungIdx::TOP, RungIdx::new(1));
        let talk = |from: u32, tokens: u32| -> Vec<u32> { (from..from + tokens).collect() };
        let check = |prefixes: &Prefixes, owner, rung, prompt: &[u32], expected: Option<usize>| {
            assert_eq!(prefixes.find(owner, rung, prompt).map(|(_, common)| common), expected);
        };
        prefixes.keep(mail, top, cache(&ledger, &talk(0, 40)));
        check(&prefixes, mail, top, &talk(0, 60), Some(40));
        check(&prefixes, mail, top, &talk(0, 40), Some(39));
        check(&prefixes, mail, top, &talk(0, 10), None);
        check(&prefixes, mail, top, &talk(5, 40), None);
        check(&prefixes, mail, below, &talk(0, 60), None);
        check(&prefixes, notes, top, &talk(0, 60), None);
        check(&prefixes, (mail.0, Some(2)), top, &talk(0, 60), None);
        // A later turn takes the place of an earlier one; a third conversation that of the oldest.
        prefixes.keep(mail, top, cache(&ledger, &talk(0, 50)));
        prefixes.keep(mail, top, cache(&ledger, &talk(500, 20)));
        check(&prefixes, mail, top, &talk(0, 60), Some(50));
        prefixes.keep(mail, top, cache(&ledger, &talk(900, 20)));
        check(&prefixes, mail, top, &talk(0, 60), None);
        check(&prefixes, mail, top, &talk(500, 60), Some(20));
        // What a bridge has mapped, and what follows it, is not kept.
        let mut carried = cache(&ledger, &talk(0, 40));
        carried.mark(20..30, Provenance::Mapped);
        prefixes.keep(notes, top, carried);
        check(&prefixes, notes, top, &talk(0, 60), Some(20));
        let mut shed = cache(&ledger, &talk(0, 40));
        shed.shed(17..20).unwrap();
        prefixes.keep(notes, below, shed);
        check(&prefixes, notes, below, &talk(0, 60), Some(17));
        assert_eq!(prefixes.bytes(), ledger.used(Kind::Cache));
        prefixes.forget(mail.0);
        check(&prefixes, mail, top, &talk(500, 60), None);
        while prefixes.forget_oldest() {}
        assert_eq!(ledger.used(Kind::Cache), Bytes::ZERO);
        Prefixes::new(0).keep(mail, top, cache(&ledger, &talk(0, 40)));
        assert_eq!(ledger.used(Kind::Cache), Bytes::ZERO);
    }
}
