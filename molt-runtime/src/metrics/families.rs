//! Every metric that there is: name, kind, meaning. What is recorded, described, documented and drawn is held against
//! this one list by tests.

/// What kind of metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Only rises.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts by size, with these upper bounds.
    Histogram(&'static [f64]),
}

/// A metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Family {
    /// Its name, in base units.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// What it means.
    pub help: &'static str,
}

/// From a token on a fast machine to an answer that waited for memory.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0];

const fn counter(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Counter, help }
}

const fn gauge(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Gauge, help }
}

const fn seconds(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Histogram(SECONDS), help }
}

/// All of them, in the order of the operator's table.
pub const FAMILIES: &[Family] = &[
    gauge("molt_info", "Always 1; its labels say what is served and by what: ladder, version, isa."),
    gauge("molt_rung_weights_bytes", "Weights of a rung when it is loaded, by rung and precision."),
    gauge("molt_budget_bytes", "Bytes that the process may use now."),
    gauge("molt_usage_bytes", "Bytes in use by the books, after the levers of the last round."),
    gauge("molt_usage_kind_bytes", "Bytes in use by kind: weights, cache, scratch, bridge, tables, overhead."),
    gauge("molt_overshoot_bytes", "Usage minus budget after the levers of the last round; below zero it is headroom."),
    gauge("molt_overshoot_max_bytes", "Largest usage minus budget after the levers of any round since the start."),
    gauge("molt_drift_bytes", "Usage by the books minus what the scheduler had reckoned with."),
    gauge("molt_resident_bytes", "Resident set of the process, as the system says."),
    gauge("molt_resident_file_bytes", "Of the resident set, pages of files, which the system may drop."),
    gauge("molt_sequences", "Sequences by class and state: waiting (the queue), running, parked."),
    counter("molt_rounds_total", "Rounds of the engine; they go on when it is idle, and stop when it hangs."),
    counter("molt_budget_changes_total", "Changes of the budget, by more than a sixty-fourth, that a round has seen."),
    counter("molt_limit_steps_total", "Steps of limits that pressure sets, by direction: down, up, lifted."),
    counter("molt_given_up_steps_total", "Steps that were given up because memory was wanted, and done again."),
    counter(
        "molt_standbys_total",
        "Times that a rung was fetched into the page cache, before a fall of the budget or a way up.",
    ),
    counter("molt_levers_total", "Levers used, by kind and by the class that bore them."),
    counter("molt_lever_freed_bytes_total", "Bytes that levers freed, by kind and class."),
    counter("molt_shed_tokens_total", "Tokens of old context that were shed, by class."),
    counter("molt_unparks_total", "Parked sequences that ran again, by class."),
    counter("molt_switches_total", "Changes of rung by route and result: done, or failed (the next route was taken)."),
    counter("molt_switch_tokens_total", "Tokens that changes of rung left in caches, by provenance."),
    counter("molt_reread_tokens_total", "Tokens read again from the start because no cheaper route was there."),
    counter("molt_healed_tokens_total", "Tokens read natively in the background until a cache was exact again."),
    counter("molt_read_ahead_tokens_total", "Tokens read ahead on another rung, by whether a switch has used them."),
    counter("molt_requests_total", "Requests taken, by class."),
    counter("molt_prompt_tokens_total", "Tokens of the prompts of requests taken, by class."),
    counter(
        "molt_reused_tokens_total",
        "Tokens of prompts that were not read, for an earlier turn or a resumed answer had left them, by class.",
    ),
    counter("molt_refusals_total", "Requests refused for good, by reason."),
    counter("molt_tokens_total", "Tokens of answers, by the rung that wrote them and by class."),
    counter("molt_answers_total", "Answers that ended, by class and end: stop, length, cancelled by their client."),
    counter("molt_troubles_total", "What failed and was dealt with, by kind; nothing was lost."),
    seconds("molt_enforce_seconds", "From reading the budget until every lever of the round was executed."),
    seconds(
        "molt_reaction_seconds",
        "From the signal that memory is wanted until the resident set is below the budget, give or take 2 % and pages of \
         the program's own file.",
    ),
    seconds("molt_reaction_stall_seconds", "Between the tokens before and after such a signal, by class."),
    seconds("molt_switch_seconds", "From the signal to a usable cache on the other rung, by route."),
    seconds("molt_carry_seconds", "The carry alone, both rungs loaded, by route."),
    seconds("molt_heal_seconds", "Time that healing a cache took in all."),
    seconds("molt_heal_wait_seconds", "The longest that next tokens waited for a part of a healing."),
    seconds("molt_read_ahead_seconds", "Time that reading a cache ahead took in all."),
    seconds("molt_load_seconds", "Loading the weights of a rung, by rung."),
    seconds("molt_release_seconds", "Giving back the weights of a rung, by rung."),
    seconds("molt_queue_wait_seconds", "From asking to being let in, by class."),
    seconds("molt_first_token_seconds", "From asking to the first token, by class."),
    seconds("molt_inter_token_seconds", "Between two tokens of an answer, by class."),
    seconds("molt_answer_seconds", "From asking to the end of the answer, by class; cancelled ones are not in it."),
    seconds("molt_stall_seconds", "Waits for a next token of more than a second, by class."),
];
