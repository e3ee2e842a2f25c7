//! `moltd`: the service. One ladder on a Unix socket, for clients that speak OpenAI's HTTP.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{CommandFactory as _, Parser};
use molt_models::{Ladder, LadderFile};
use molt_runtime::budget::{OperatorBudget, Strictest, Watched};
use molt_runtime::config::{Loopback, ServiceConfig};
use molt_runtime::demo::start;
use molt_runtime::engine::Engine;
use molt_runtime::event::Event;
use molt_runtime::manual::{self, EXIT_CODES};
use molt_runtime::metrics::{self, Metrics};
use molt_runtime::service::{EngineClient, Listener, Log, Service, Tenants, Watch, feed, loopback, router, serve};
use molt_runtime::state::State;
use molt_runtime::workers::Workers;
use molt_runtime::{memory, paths, systemd};
use molt_scheduler::units::{Bytes, Tokens};
use parking_lot::RwLock;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};

/// Serves a ladder on a Unix socket. The budget is set with `PUT /v1/budget`.
#[derive(Parser)]
#[command(name = "moltd", version, after_help = EXIT_CODES)]
struct Args {
    /// The configuration file; deploy/moltd.toml shows every key. What is given on the command line goes before it.
    #[arg(long, global = true)]
    config: Option<PathBuf>,
    /// The socket.
    #[arg(long)]
    socket: Option<PathBuf>,
    /// A built-in ladder, or the path of a ladder file.
    #[arg(long, global = true)]
    ladder: Option<String>,
    /// Folder of the model files [default: where `molt pull` puts them].
    #[arg(long, global = true)]
    models: Option<PathBuf>,
    /// Bytes that may be used at first, in MiB [default: half of what the system has available].
    #[arg(long)]
    budget_mib: Option<u64>,
    /// Most tokens of a conversation [default: what the models were trained for, at most 4096].
    #[arg(long)]
    context: Option<u64>,
    /// A loopback address that serves `GET /metrics` alone, for a Prometheus that scrapes no sockets [default: none].
    #[arg(long, value_parser = loopback)]
    metrics_listen: Option<SocketAddr>,
    #[command(flatten)]
    workers: Workers,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Check the configuration and the ladder, and serve nothing.
    Check,
    /// Print completions for a shell.
    #[command(hide = true)]
    Completions {
        /// The shell.
        shell: manual::Shell,
    },
    /// Write the manual pages into a folder.
    #[command(hide = true)]
    Man {
        /// The folder; made if it is not there.
        folder: PathBuf,
    },
}

impl Args {
    /// The file's settings, and over them those of the command line.
    fn config(&self) -> Result<ServiceConfig> {
        let mut config = match &self.config {
            Some(path) => ServiceConfig::read(path)?,
            None => ServiceConfig::default(),
        };
        if let Some(socket) = &self.socket {
            config.socket.clone_from(socket);
        }
        if let Some(ladder) = &self.ladder {
            config.ladder.clone_from(ladder);
        }
        config.models = self.models.clone().or(config.models);
        config.budget_mib = self.budget_mib.or(config.budget_mib);
        config.context = self.context.or(config.context);
        config.threads = self.workers.threads.or(config.threads);
        config.pin |= self.workers.pinned;
        Ok(config)
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("moltd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    match &args.command {
        Some(Command::Completions { shell }) => {
            return manual::completions(Args::command(), *shell, &mut std::io::stdout()).context("cannot print");
        }
        Some(Command::Man { folder }) => {
            return manual::pages(Args::command(), folder)
                .with_context(|| format!("cannot write to {}", folder.display()));
        }
        Some(Command::Check) | None => {}
    }
    let config = args.config()?;
    let models = config.models.clone().or_else(paths::models_folder);
    let models = models.context("no folder for models: give --models, or set MOLT_MODELS or HOME")?;
    let (claim, beside) = LadderFile::find(&config.ladder)?;
    let ladder = Arc::new(Ladder::check(&claim.with_cache(config.cache), beside.as_deref(), &models)?);
    let trained = ladder.trained_context() as u64;
    let context = Tokens::new(config.context.unwrap_or(trained.min(4_096)));
    if context.get() > trained {
        bail!("a context of {}: the ladder's models were trained for {trained} tokens", context.get());
    }
    let budget = match config.budget_mib {
        Some(mib) => Bytes::mib(mib),
        None => Bytes::new(memory::available().context("the system does not say what memory it has")?.get() / 2),
    };
    let spec = config
        .default_tenant
        .check(context)
        .map_err(|(field, reason)| anyhow::anyhow!("the default tenant: {field} {reason}"))?;
    check_tenants(&config, context)?;
    if let Some(Command::Check) = args.command {
        println!("the configuration is good: {} on {}, budget {budget}", ladder.name(), config.socket.display());
        return Ok(());
    }
    let (passed, metrics) = (systemd::passed_socket().context("the socket that was passed")?, Metrics::new());
    let scheduler = config.scheduler(memory::total().unwrap_or(Bytes::MAX));
    let mut engine = Engine::new(ladder.clone(), scheduler, config.engine())?;
    let tenant = engine.register(&config.default_tenant.name, spec);
    let tenants = Tenants::new(tenant, config.default_tenant.clone(), config.tenants);
    let state = open_state(&config);
    let tenants = Arc::new(match &state {
        None => tenants,
        Some(state) => tenants.with_state(state.clone(), |claim| {
            let spec = claim.check(context).map_err(|(field, reason)| {
                state.tell(format!("the tenant {} is not registered again: {field} {reason}", claim.name));
            });
            spec.ok().map(|spec| engine.register(&claim.name, spec))
        }),
    });
    let operator = OperatorBudget::new(budget, engine.alarm().clone());
    let measured = config.budget.measured(memory::total().unwrap_or(Bytes::ZERO), engine.alarm())?;
    let sources = Strictest::new(vec![Box::new(operator.clone())], measured);
    let watched = Watched::start(sources, engine.alarm().clone())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // First, for it can fail and leaves nothing behind.
        let scraped = match args.metrics_listen {
            Some(address) => Some(TcpListener::bind(address).await.with_context(|| format!("cannot bind {address}"))?),
            None => None,
        };
        let beside = match config.listen.map(Loopback::address) {
            Some(address) => Some(TcpListener::bind(address).await.with_context(|| format!("cannot bind {address}"))?),
            None => None,
        };
        let activated = passed.is_some();
        let listener = match passed {
            Some(socket) => UnixListener::from_std(socket)?,
            None => bind_with_mode(&config)?,
        };
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let mut hangup = signal(SignalKind::hangup())?;
        let (feed, feed_routes) = feed::Feed::new();
        let (mut watch, log) = (Watch::new(metrics.clone(), feed), Log::new(config.log));
        watch.see(&Event::Start(start(&ladder, &engine, 0)));
        let books = engine.books();
        // Not before all that may fail: whoever takes it is the last to have it.
        for left in state.iter().flat_map(|state| state.take_prefixes()) {
            engine.adopt_prefix(left);
        }
        let (client, ended) =
            EngineClient::start(engine, watched.clone(), config.workers(), watch, log.clone(), state.clone())?;
        let service = Arc::new(Service {
            ladder: ladder.clone(),
            engine: client.clone(),
            budget: operator,
            watched,
            books,
            context,
            tenants: tenants.clone(),
            profiles: RwLock::new(config.profiles.clone()),
            state: state.clone(),
        });
        let reaper = tokio::spawn(end_leases(tenants, client.clone(), state));
        if let Some(listener) = &scraped {
            eprintln!("moltd: metrics on http://{}/metrics", listener.local_addr()?);
        }
        if let Some(listener) = &beside {
            eprintln!("moltd: listening on http://{}", listener.local_addr()?);
        }
        eprintln!("moltd: serving {} on {}, budget {budget}", ladder.name(), config.socket.display());
        let upkeep = metrics.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(metrics::UPKEEP).await;
                upkeep.upkeep();
            }
        });
        if let Some(listener) = scraped {
            tokio::spawn(metrics::serve(listener, metrics.clone()));
        }
        let routes = router(service.clone()).merge(metrics::routes(metrics));
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let beside = beside.map(|port| tokio::spawn(serve(Listener::Tcp(port), routes.clone(), stopped.clone())));
        // What everybody does is told to those who may use the socket.
        let routes = routes.merge(feed::routes(feed_routes));
        let mut served = tokio::spawn(serve(Listener::Unix(listener), routes, stopped));
        let (mut ended, mut current, mut runs) = (ended, config.clone(), true);
        let outcome = loop {
            tokio::select! {
                _ = terminate.recv() => break Ok(()),
                _ = interrupt.recv() => break Ok(()),
                _ = hangup.recv() => reload(args, &mut current, &service, &log),
                ended = &mut ended => {
                    runs = false;
                    break ended.context("the engine stopped by itself; this is a bug in Molt");
                }
                served = &mut served => break served.context("the service failed"),
            }
        };
        // Streams end with the engine, and whoever waits for a whole answer is told so. A client that stalls does not
        // hold the daemon up for longer than this.
        reaper.abort();
        systemd::stopping();
        client.stop();
        stop.send_replace(true);
        let mut open =
            [Some(served), beside].into_iter().flatten().filter(|served| !served.is_finished()).collect::<Vec<_>>();
        let all = async {
            for served in &mut open {
                // One that failed has ended too.
                let _ended = served.await;
            }
        };
        if tokio::time::timeout(GRACE, all).await.is_err() {
            eprintln!("moltd: some clients did not finish within {} s", GRACE.as_secs());
            open.iter().for_each(tokio::task::JoinHandle::abort);
        }
        // What is kept of answers must have arrived, whether or not anybody waits for their streams.
        if runs && tokio::time::timeout(GRACE, ended).await.is_err() {
            eprintln!("moltd: not every cache was written within {} s", GRACE.as_secs());
        }
        // A socket that was passed belongs to who passed it, and goes on collecting clients.
        if !activated {
            std::fs::remove_file(&config.socket)
                .with_context(|| format!("cannot remove {}", config.socket.display()))?;
        }
        outcome
    })
}

/// Reads the configuration again. What is wrong with it changes nothing; what cannot change while the daemon runs is named.
fn reload(args: &Args, current: &mut ServiceConfig, service: &Service, log: &Log) {
    // Until the end of this function: whoever waits for the reload finds all of it done.
    let _reloading = systemd::reloading();
    let new = match args.config().and_then(|new| check_tenants(&new, service.context).map(|()| new)) {
        Ok(new) => new,
        Err(error) => {
            eprintln!("moltd: not reloaded, everything stays as it was: {error:#}");
            return;
        }
    };
    log.set(new.log);
    service.tenants.set_limits(new.tenants);
    service.profiles.write().clone_from(&new.profiles);
    // What an operator has set since stays, unless the file says something new.
    if let Some(mib) = new.budget_mib.filter(|_| new.budget_mib != current.budget_mib) {
        service.budget.set(Bytes::mib(mib));
    }
    match current.fixed_changes(&new).as_slice() {
        [] => eprintln!("moltd: reloaded"),
        fixed => eprintln!("moltd: reloaded, but for what needs a restart: {}", fixed.join(", ")),
    }
    // What needs a restart is still what the daemon began with.
    let ServiceConfig { log, budget_mib, tenants, profiles, .. } = new;
    *current = ServiceConfig { log, budget_mib, tenants, profiles, ..current.clone() };
}

/// Whether every tenant of the configuration makes sense with that limit of a sequence.
fn check_tenants(config: &ServiceConfig, context: Tokens) -> Result<()> {
    for profile in &config.profiles {
        let name = &profile.name;
        profile.check(context).map_err(|(field, reason)| anyhow::anyhow!("the profile {name}: {field} {reason}"))?;
    }
    Ok(())
}

/// Binds the socket and gives it its mode.
fn bind_with_mode(config: &ServiceConfig) -> Result<UnixListener> {
    let listener = bind(&config.socket)?;
    std::fs::set_permissions(&config.socket, std::fs::Permissions::from_mode(config.socket_mode.bits()))
        .with_context(|| format!("cannot set the mode of {}", config.socket.display()))?;
    Ok(listener)
}

/// The folder of what outlives the daemon, if there is one that can be used. Without it everything else is served.
fn open_state(config: &ServiceConfig) -> Option<Arc<State>> {
    let given = std::env::var("STATE_DIRECTORY").ok();
    let folder = config.state.folder(given.as_deref())?;
    match State::open(&folder, config.state.settings()) {
        Ok(state) => Some(state),
        Err(error) => {
            eprintln!("moltd: nothing will outlive this daemon: {:#}", anyhow::Error::from(error));
            None
        }
    }
}

/// Ends registrations that nobody has used for the grace time, and drops answers that nobody has asked for.
async fn end_leases(tenants: Arc<Tenants>, engine: EngineClient, state: Option<Arc<State>>) {
    loop {
        tokio::time::sleep(LEASES).await;
        if let Some(state) = state.clone() {
            // Where the runtime ends meanwhile, the next daemon does it.
            let _ended = tokio::task::spawn_blocking(move || state.expire()).await;
        }
        for tenant in tenants.expired() {
            if engine.deregister(tenant).await.is_err() {
                return;
            }
        }
    }
}

/// How often leases are looked at.
const LEASES: Duration = Duration::from_secs(5);

/// How long clients may take to finish once the daemon stops.
const GRACE: Duration = Duration::from_secs(5);

/// Binds the socket. A stale one is replaced; one that somebody listens on is an error.
fn bind(path: &Path) -> Result<UnixListener> {
    match UnixListener::bind(path) {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
            match UnixStream::connect(path) {
                Ok(_) => bail!("somebody serves on {} already", path.display()),
                Err(refused) if is_socket && refused.kind() == ErrorKind::ConnectionRefused => {}
                Err(other) => bail!("{} is in the way and is no stale socket: {other}", path.display()),
            }
            std::fs::remove_file(path)
                .with_context(|| format!("cannot replace the stale socket {}", path.display()))?;
            UnixListener::bind(path).with_context(|| format!("cannot bind {}", path.display()))
        }
        Err(error) => Err(error).with_context(|| format!("cannot bind {}", path.display())),
    }
}
