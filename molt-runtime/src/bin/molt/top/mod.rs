//! `molt top`: budget, tenants, levers and switches on a terminal, as they happen.

mod draw;
mod state;

use std::io::IsTerminal as _;
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event as Input, KeyCode, KeyModifiers};
use reqwest::Method;

use crate::connection::{self, Client, Service};
use crate::events::PATH;
use crate::told::Told;
use state::{Registered, State};

/// Watch the service: budget against usage, tenants with their rungs, levers and switches as they happen. `q` quits.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Look for so many seconds, print one picture and end; needs no terminal.
    #[arg(long, value_name = "SECONDS")]
    once: Option<u64>,
    #[command(flatten)]
    service: Service,
}

/// What comes from the service.
enum Heard {
    Told(Box<Told>),
    Registered(Vec<Registered>),
    Gone(String),
}

/// Between two looks at the keyboard, and two pictures.
const FRAME: Duration = Duration::from_millis(100);
/// Between two looks at who is registered, and two tries to reach a service that is gone.
const LOOK: Duration = Duration::from_secs(1);
/// Size of a picture that is printed.
const PRINTED: (u16, u16) = (120, 36);

pub(crate) fn run(args: &Args) -> Result<()> {
    let client = Client::new(&args.service)?;
    let (tell, heard) = channel();
    let (feed, list) = (client.clone(), tell.clone());
    // Both end with the program.
    std::thread::Builder::new().name("molt-feed".to_owned()).spawn(move || follow(&feed, &tell))?;
    std::thread::Builder::new().name("molt-tenants".to_owned()).spawn(move || look(&client, &list))?;
    match args.once {
        Some(seconds) => once(&heard, Duration::from_secs(seconds)),
        None if !std::io::stdout().is_terminal() => {
            bail!("`molt top` draws on a terminal; `molt events` prints lines, and --once one picture")
        }
        // `run` gives the terminal back however it ends, a panic included.
        None => ratatui::run(|terminal| watch(terminal, &heard)),
    }
}

fn watch(terminal: &mut ratatui::DefaultTerminal, heard: &Receiver<Heard>) -> Result<()> {
    let mut state = State::default();
    loop {
        heard.try_iter().for_each(|news| hear(&mut state, news));
        terminal.draw(|frame| frame.render_widget(&state, frame.area())).context("cannot draw")?;
        if event::poll(FRAME)? && quits(&event::read()?) {
            return Ok(());
        }
    }
}

fn quits(input: &Input) -> bool {
    let Input::Key(key) = input else { return false };
    let ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    ctrl_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}

fn once(heard: &Receiver<Heard>, span: Duration) -> Result<()> {
    let (mut state, until) = (State::default(), Instant::now() + span);
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        if let Ok(news) = heard.recv_timeout(left) {
            hear(&mut state, news);
        }
    }
    if let Some(reason) = state.gone {
        bail!("{reason}");
    }
    let mut terminal = Terminal::new(TestBackend::new(PRINTED.0, PRINTED.1))?;
    terminal.draw(|frame| frame.render_widget(&state, frame.area()))?;
    let rows = terminal.backend().buffer().content().chunks(usize::from(PRINTED.0));
    for row in rows {
        let row: String = row.iter().map(ratatui::buffer::Cell::symbol).collect();
        println!("{}", row.trim_end());
    }
    Ok(())
}

fn hear(state: &mut State, news: Heard) {
    match news {
        Heard::Told(told) => {
            state.gone = None;
            state.hear(&told);
        }
        Heard::Registered(all) => state.registered(&all),
        Heard::Gone(reason) => state.gone = Some(reason),
    }
}

/// Follows the feed, and tries again when the service is gone, until nobody listens.
fn follow(client: &Client, tell: &Sender<Heard>) {
    let Ok(runtime) = connection::runtime() else { return };
    loop {
        let listening = client.listen(Method::GET, PATH, None, |data| {
            let told: Told = serde_json::from_slice(data).context("the service sent something else than an event")?;
            let heard = tell.send(Heard::Told(Box::new(told)));
            Ok(if heard.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        });
        let reason = match runtime.block_on(listening) {
            Ok(true) => return,
            Ok(false) => "the service has stopped".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        if tell.send(Heard::Gone(reason)).is_err() {
            return;
        }
        std::thread::sleep(LOOK);
    }
}

/// Looks who is registered, now and again.
fn look(client: &Client, tell: &Sender<Heard>) {
    let Ok(runtime) = connection::runtime() else { return };
    loop {
        // That the service is gone is told by whoever follows the feed.
        if let Ok(mut answer) = runtime.block_on(client.ask(Method::GET, "/v1/tenants", None)) {
            let all = serde_json::from_value(answer["data"].take()).unwrap_or_default();
            if tell.send(Heard::Registered(all)).is_err() {
                return;
            }
        }
        std::thread::sleep(LOOK);
    }
}
