//! Serves a model by a single server and by a fleet, and compares the answers.

mod answers;
mod client;
mod fleet;
mod kill;
mod model;
mod openings;
mod screen;

use std::io::Write;
use std::time::Instant;

use serde_json::json;

use self::fleet::Fleet;
use self::model::DemoModel;
use self::screen::Screen;
use super::arguments::Arguments;
use crate::Result;

pub(super) use self::screen::Format;

/// Runs the demo over one backend after the other. `Ok` means that every answer equals the single
/// server's.
pub(super) fn run(arguments: &Arguments, format: Format, out: &mut dyn Write) -> Result<()> {
    let screen = &mut Screen::new(out, format);
    model::remove_when_interrupted()?;
    introduce(arguments, screen)?;
    for (at, backend) in arguments.backend.iter().enumerate() {
        screen.expect(steps(arguments), arguments.backend.len() - at - 1);
        let begun = Instant::now();
        let model = DemoModel::open(arguments.model.as_deref())?;
        let mut fleet = Fleet::start(arguments, backend, model.folder(), screen)?;
        drop(model);
        let (seconds, router) = (begun.elapsed().as_secs_f64(), fleet.router.port);
        screen.line(format_args!(
            "\n{backend}: the servers started in {seconds:.1} s. The router's status page is\n\
             http://127.0.0.1:{router}/"
        ))?;
        let ports = |servers: &[fleet::Server]| -> Vec<u16> {
            servers.iter().map(|server| server.port).collect()
        };
        screen.event(&json!({
            "event": "started", "backend": backend, "seconds": seconds, "router_port": router,
            "single_port": fleet.single.port, "prefill_ports": ports(&fleet.prefills),
            "decode_ports": ports(&fleet.decodes),
        }))?;
        let different = answers::compare(&fleet, arguments, backend, screen)?;
        judge(different, arguments.corrupt)?;
        screen.line(format_args!(
            "\n  Every answer of the fleet equals the single server's, token by token."
        ))?;
        if arguments.serve {
            return serve(router, screen);
        }
        kill::during_prefill(&mut fleet, backend, screen)?;
        if arguments.kill {
            kill::during_transfer(arguments, backend, &fleet.single, screen)?;
        }
    }
    screen.event(&json!({"event": "end", "equal": true}))
}

/// Returns the number of steps over one backend.
fn steps(arguments: &Arguments) -> usize {
    // The single server and the router start, and the router finds its servers.
    let starts = usize::from(arguments.prefillers) + usize::from(arguments.decoders) + 3;
    let answers = 2 * openings::OPENINGS.len();
    let kills = if arguments.prefillers > 1 { 2 } else { 0 };
    // For each policy, two servers start and one is killed.
    starts + answers + kills + if arguments.kill { 6 } else { 0 }
}

fn introduce(arguments: &Arguments, screen: &mut Screen<'_>) -> Result<()> {
    let count = |count: u8, name: &str| match count {
        1 => format!("a {name} server"),
        more => format!("{more} {name} servers"),
    };
    screen.line(format_args!(
        "A model is served twice: by a single server (alone), and by a fleet (apart) of {},\n\
         {} and a router. A prefill server computes the KV cache of a prompt; a decode\n\
         server fetches it and continues the text.",
        count(arguments.prefillers, "prefill"),
        count(arguments.decoders, "decode"),
    ))?;
    match &arguments.model {
        Some(model) => screen.line(format_args!("The model is {}.", model.display())),
        None => screen.line(format_args!(
            "The model has 1.5 million parameters and was trained on Jane Austen's novels. It\n\
             writes English words that seldom make sense. The last text that it continues is a\n\
             chapter of these novels."
        )),
    }
}

/// Fails if answers differ, or if they are equal although a block was corrupted.
fn judge(different: usize, corrupt: bool) -> Result<()> {
    match (different, corrupt) {
        (0, false) => Ok(()),
        (0, true) => Err("a transferred block was corrupted, but every answer is the same: they were not made from the transferred blocks".into()),
        (_, false) => Err(format!("{different} answers differ from the single server's").into()),
        (_, true) => Err(format!("{different} answers differ from the single server's, as expected: a transferred block was corrupted").into()),
    }
}

/// Leaves the servers running until a signal ends this process.
fn serve(router: u16, screen: &mut Screen<'_>) -> Result<()> {
    screen.line(format_args!(
        "\n  curl http://127.0.0.1:{router}/v1/completions -H 'content-type: application/json' \
         -d '{{\"prompt\": \"My dear Jane,\", \"max_tokens\": 32}}'\n  Ctrl-C ends the servers."
    ))?;
    loop {
        std::thread::park();
    }
}
