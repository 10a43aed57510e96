//! Measures a list of points: announces what it costs, shows the progress, and checks the bytes.

use kvx::{Options, Registry};

use super::companion::Companion;
use super::estimate;
use super::figures::Figures;
use super::measure;
use super::points::{self, Point};
use super::pools::Sizes;
use super::rounds::Effort;
use super::session::Session;
use crate::progress::Progress;
use crate::{Result, bytes};

/// Returns the names of the backends that a user wrote, each once, and their versions.
pub(super) fn names(
    written: &[String],
    registry: &Registry,
    options: &Options,
) -> Result<(Vec<&'static str>, Vec<String>)> {
    let (mut names, mut versions) = (Vec::new(), Vec::new());
    for written in written {
        let (factory, availability) = registry.require(written, options)?;
        if !names.contains(&factory.name()) {
            names.push(factory.name());
            versions.push(format!("{} {}", factory.name(), availability.version));
        }
    }
    Ok((names, versions))
}

/// The settings of a run.
pub(super) struct Run<'a> {
    pub(super) backends: &'a [&'static str],
    pub(super) registry: &'a Registry,
    /// Options of both agents.
    pub(super) options: &'a str,
    pub(super) effort: Effort,
    /// The companion program.
    pub(super) beside: Option<&'a str>,
}

impl Run<'_> {
    /// Measures all points, and calls `found` with the number and the figures of each. `called` is
    /// what the announcement calls more than one of them, and `label` what the progress calls each.
    pub(super) fn measure(
        &self,
        points: &[Point],
        called: &str,
        label: impl Fn(usize) -> String,
        mut found: impl FnMut(usize, Figures) -> Result<()>,
    ) -> Result<()> {
        let Run { backends, registry, options, effort, beside } = *self;
        let sizes = points::memory(points);
        let about = estimate::duration(points, effort, beside.is_some())?;
        let called = if points.len() == 1 { called.trim_end_matches('s') } else { called };
        let memory = announced_memory(sizes);
        eprintln!("{} {called}, {memory}, {}", points.len(), estimate::announced(about));
        let mut progress = Progress::new(points.len() * effort.rounds, about);
        progress.show("starting");
        let mut session = Session::start(backends, registry, options, sizes, about)?;
        let mut beside = beside.map(Companion::start).transpose()?;
        let mut wrong = 0;
        for (at, point) in points.iter().enumerate() {
            let what = label(at);
            progress.show(&what);
            let step = || progress.step(&what);
            let figures = measure::point(&mut session, point, beside.as_mut(), effort, step)?;
            progress.clear();
            wrong += usize::from(!figures.verified);
            found(at, figures)?;
        }
        if let Some(beside) = beside {
            beside.end();
        }
        session.end()?;
        if wrong > 0 {
            return Err(format!("wrong bytes arrived at {wrong} of {} points", points.len()).into());
        }
        Ok(())
    }
}

fn announced_memory(sizes: (Sizes, Sizes)) -> String {
    let most = |of: fn(Sizes) -> u64| of(sizes.0).max(of(sizes.1));
    let shown = |size: u64| {
        // A size that no unit divides is rounded up.
        bytes::show(if size > 1 << 20 { size.div_ceil(1 << 20) << 20 } else { size })
    };
    match (most(Sizes::on_host), most(Sizes::on_device)) {
        (host, 0) => format!("{} of memory per side", shown(host)),
        (host, device) => {
            let host =
                if host > 0 { format!("{} of memory and ", shown(host)) } else { String::new() };
            format!(
                "{host}{} of GPU memory per side, and twice as much for the limits",
                shown(device)
            )
        }
    }
}
