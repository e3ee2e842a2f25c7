//! The engine on a thread of its own: commands in, events out to whoever asked. No async near the compute.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use molt_scheduler::units::Time;
use molt_scheduler::{LeverKind, Refusal, SequenceId, TenantId, TenantSpec};
use tokio::sync::{mpsc, oneshot};

use crate::budget::Watched;
use crate::engine::{AnswerRequest, Begun, Engine};
use crate::event::{Event, FinishReason, TroubleKind};
use crate::service::{Log, Watch};
use crate::state::{Keeping, Recorder, State};
use crate::workers::Workers;

/// Commands that may wait for the engine; whoever sends more waits.
const COMMANDS: usize = 256;
/// Events that may wait for a reader before its answer is ended: some minutes of reading.
const EVENTS: usize = 4_096;
/// Between two rounds when there is nothing to do: how soon an idle daemon notices a smaller budget.
const IDLE: Duration = Duration::from_millis(500);
/// Between two rounds when everybody is parked.
const PARKED: Duration = Duration::from_millis(20);

enum Command {
    Submit { tenant: TenantId, asked: Box<Asked>, reply: oneshot::Sender<Result<mpsc::Receiver<Event>, Refusal>> },
    Register { name: String, spec: TenantSpec, reply: oneshot::Sender<TenantId> },
    Deregister { tenant: TenantId },
    Stop,
}

/// What a client asks for, and what is kept of it.
#[derive(Debug)]
pub struct Asked {
    /// What is asked for.
    pub request: AnswerRequest,
    /// Where it stands, if it was begun before.
    pub begun: Option<Begun>,
    /// What outlives the daemon, if anything does.
    pub keeping: Option<Keeping>,
}

/// Talks to the engine thread.
#[derive(Debug, Clone)]
pub struct EngineClient {
    commands: Sender<Command>,
}

/// The engine has stopped and takes nothing any more.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the engine has stopped")]
pub struct EngineGone;

impl EngineClient {
    /// Starts the thread. The receiver hears when it has stopped, or fails when it stopped by itself.
    pub fn start(
        engine: Engine,
        budget: Watched,
        workers: Workers,
        watch: Watch,
        log: Log,
        state: Option<Arc<State>>,
    ) -> std::io::Result<(Self, oneshot::Receiver<()>)> {
        let (commands, taken) = bounded(COMMANDS);
        let (alive, ended) = oneshot::channel();
        let pool = workers.pool().map_err(std::io::Error::other)?;
        // Where nothing is kept there is nothing to write.
        let recorder = state.as_ref().map(|_| Recorder::start()).transpose()?;
        let thread = std::thread::Builder::new().name("molt-engine".to_owned()).spawn(move || {
            let (readers, started) = (BTreeMap::new(), Instant::now());
            let run = Run { engine, budget, watch, log, state, recorder, readers, started };
            if !pool.install(|| run.until_stopped(&taken)) {
                return;
            }
            // Said only by an orderly end; a panic, or a round that always fails, drops it unsaid. Where nobody listens the
            // program is ending.
            let _unheard = alive.send(());
        })?;
        drop(thread);
        Ok((Self { commands }, ended))
    }

    /// Asks for an answer; its events come from the receiver. Dropping the receiver ends the answer.
    pub async fn submit(
        &self,
        tenant: TenantId,
        asked: Asked,
    ) -> Result<Result<mpsc::Receiver<Event>, Refusal>, EngineGone> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Submit { tenant, asked: Box::new(asked), reply }).await?;
        answer.await.map_err(|_| EngineGone)
    }

    /// Registers a tenant.
    pub async fn register(&self, name: String, spec: TenantSpec) -> Result<TenantId, EngineGone> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Register { name, spec, reply }).await?;
        answer.await.map_err(|_| EngineGone)
    }

    /// Forgets a tenant; whatever of it still runs ends.
    pub async fn deregister(&self, tenant: TenantId) -> Result<(), EngineGone> {
        self.send(Command::Deregister { tenant }).await
    }

    async fn send(&self, mut command: Command) -> Result<(), EngineGone> {
        // A full queue of commands means that the engine is in the middle of a long round: ask again in a moment.
        while let Err(error) = self.commands.try_send(command) {
            match error {
                crossbeam_channel::TrySendError::Full(back) => command = back,
                crossbeam_channel::TrySendError::Disconnected(_) => return Err(EngineGone),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Has the engine stop after its round.
    pub fn stop(&self) {
        // Where it has stopped already there is nobody to tell.
        let _gone = self.commands.send(Command::Stop);
    }
}

struct Run {
    engine: Engine,
    budget: Watched,
    watch: Watch,
    log: Log,
    state: Option<Arc<State>>,
    recorder: Option<Recorder>,
    readers: BTreeMap<SequenceId, Reader>,
    started: Instant,
}

/// Who reads an answer, and what is kept of it.
struct Reader {
    events: mpsc::Sender<Event>,
    keeping: Option<Keeping>,
}

impl Reader {
    /// Something happened to the answer, whose tokens so far are these. What is kept is written before anybody hears of it.
    fn keep(&mut self, event: &Event, answered: &[u32]) {
        match event {
            Event::Token { .. } => {
                if let Some(keeping) = &mut self.keeping {
                    keeping.write(answered);
                }
            }
            Event::Finished { reason, .. } => {
                if let Some(keeping) = self.keeping.take() {
                    keeping.finish(answered, *reason == FinishReason::Stop);
                }
            }
            // It cannot go on, now or later.
            Event::Trouble { .. } => self.forget(),
            _ => {}
        }
    }

    fn forget(&mut self) {
        if let Some(keeping) = self.keeping.take() {
            keeping.forget();
        }
    }
}

impl Run {
    /// Rounds until it is told to stop; false where it cannot go on.
    fn until_stopped(mut self, commands: &Receiver<Command>) -> bool {
        let mut told = Vec::new();
        // The first round says that the service is ready.
        let mut pause = Duration::ZERO;
        loop {
            match commands.recv_timeout(pause) {
                Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    self.keep_all();
                    return true;
                }
                Ok(command) => self.take(command),
                Err(RecvTimeoutError::Timeout) => {}
            }
            for command in commands.try_iter().take(COMMANDS) {
                match command {
                    Command::Stop => {
                        self.keep_all();
                        return true;
                    }
                    command => self.take(command),
                }
            }
            // A reader that left while its sequence waits or is parked would not be noticed by a failing send.
            let gone: Vec<_> = self.readers.extract_if(.., |_, reader| reader.events.is_closed()).collect();
            for (id, mut reader) in gone {
                reader.forget();
                self.engine.cancel(id);
            }
            let now = self.now();
            self.engine.alarm().forget();
            let budget = self.budget.budget();
            told.extend(self.budget.steps().into_iter().map(|step| (None, step.into())));
            if !self.engine.guarded_round(now, budget, &mut told) {
                // The supervisor starts another process; clients are told that the stream has broken off.
                return false;
            }
            for message in self.state.iter().flat_map(|state| state.troubles()) {
                told.push((None, Event::Trouble { kind: TroubleKind::State, route: None, message }));
            }
            let mut stepped = false;
            for (sequence, event) in told.drain(..) {
                self.watch.see(&event);
                stepped |= matches!(event, Event::Token { .. });
                let Some(sequence) = sequence else {
                    self.log.tell(&event);
                    continue;
                };
                let Some(reader) = self.readers.get_mut(&sequence) else { continue };
                reader.keep(&event, self.engine.answer_of(sequence));
                let parked = matches!(event, Event::Lever { kind: LeverKind::Park, .. });
                // A reader that has gone, or that reads slower than its answer is written for minutes, ends it.
                if reader.events.try_send(event).is_err() {
                    reader.forget();
                    self.readers.remove(&sequence);
                    self.engine.cancel(sequence);
                } else if let (true, Some(keeping), Some(recorder)) = (parked, &mut reader.keeping, &self.recorder) {
                    // It may stand still for long, and somebody wants memory: this is when machines are switched off.
                    recorder.record(&mut self.engine, sequence, keeping, true);
                }
            }
            self.record(false);
            self.readers.retain(|sequence, _| self.engine.has(*sequence));
            pause = match (self.readers.is_empty(), stepped || self.engine.has_read()) {
                (true, _) => IDLE,
                (false, true) => Duration::ZERO,
                (false, false) => PARKED,
            };
        }
    }

    /// Keeps all that outlives a daemon that is told to stop.
    fn keep_all(&mut self) {
        self.record(true);
        let Some(state) = &self.state else { return };
        state.keep_prefixes(|folder| self.engine.write_prefixes(folder, |broken| state.tell(broken)));
        // What goes wrong now no round tells any more.
        for message in state.troubles() {
            let event = Event::Trouble { kind: TroubleKind::State, route: None, message };
            self.watch.see(&event);
            self.log.tell(&event);
        }
    }

    /// Writes the caches of those answers of which enough is new, or of all.
    fn record(&mut self, all: bool) {
        let Some(recorder) = &self.recorder else { return };
        for (id, reader) in &mut self.readers {
            if let Some(keeping) = &mut reader.keeping {
                recorder.record(&mut self.engine, *id, keeping, all);
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Submit { tenant, asked, reply } => {
                let (now, Asked { request, begun, keeping }) = (self.now(), *asked);
                let is_new = begun.is_none();
                let submitted = match begun {
                    None => self.engine.submit(tenant, request, now),
                    Some(begun) => self.engine.resume(tenant, request, begun, now),
                };
                let answer = match submitted {
                    Ok(sequence) => {
                        let (reader, events) = mpsc::channel(EVENTS);
                        self.readers.insert(sequence, Reader { events: reader, keeping });
                        Ok(events)
                    }
                    Err(refusal) => {
                        // One that was begun before waits on; there may be room for it later.
                        if let Some(keeping) = keeping.filter(|_| is_new) {
                            keeping.forget();
                        }
                        Err(refusal)
                    }
                };
                // Where nobody waits for the reply, the closed receiver ends the sequence with its first event.
                let _unheard = reply.send(answer);
            }
            Command::Register { name, spec, reply } => {
                let tenant = self.engine.register(&name, spec);
                if reply.send(tenant).is_err() {
                    self.engine.deregister(tenant);
                }
            }
            Command::Deregister { tenant } => self.engine.deregister(tenant),
            // Seen by whoever takes commands.
            Command::Stop => {}
        }
    }

    fn now(&self) -> Time {
        Time::from_micros(u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}
