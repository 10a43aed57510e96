//! Runs the parts, within a budget.

use std::time::{Duration, Instant};

use super::kit::Kit;
use super::machine::{Device, Missing};
use super::parts::{self, Action, Part};
use super::report::{Outcome, Report, Verdict};
use crate::Result;
use crate::arguments::GpuOptions;
use crate::bars::lines;
use crate::harness::Progress;
use crate::process::{self, Deadline, Finished};
use crate::progress;

/// The time limit of a part in a run without a budget.
const LIMIT: Duration = Duration::from_secs(10 * 60);
/// In a run with a budget, a part may take this many times as long as expected.
const PATIENCE: u32 = 3;
/// Why a part is skipped over the stand-in.
const NOT_REACHED: &str = "it does not reach the stand-in's memory";

/// Runs the chosen parts in their order, and returns whether none failed.
pub(crate) fn all(kit: Kit, options: &GpuOptions) -> Result<bool> {
    let budget = options.minutes.map(|minutes| Deadline::after(Duration::from_secs(minutes * 60)));
    let kit = if options.stand_in { kit.over_the_stand_in()? } else { kit };
    let mut report = Report::begin(&options.results)?;
    report.about(&format!("kvx {}", kit.revision))?;
    let missing = Missing::from(&kit, &options.python, options.stand_in);
    for why in missing.all() {
        report.about(&format!("missing: {why}"))?;
    }
    let Device { description, is_stand_in } = match Device::first(&kit) {
        Ok(device) => device,
        Err(why) => {
            report.about(&format!("nothing ran: {why}"))?;
            return Err("there is no device to test".into());
        }
    };
    report.about(&description)?;
    if is_stand_in {
        report.about("This run used the stand-in for a device, so its figures mean nothing.")?;
    }
    let parts = parts::table()?;
    let chosen = |part: &&Part| {
        options.only.is_empty() || options.only.iter().any(|only| part.name.contains(only.as_str()))
    };
    if !parts.iter().any(|part| chosen(&part)) {
        return Err(format!("no part has a name with any of {:?}", options.only).into());
    }
    let seconds = parts.iter().filter(chosen).map(|part| part.seconds).sum();
    // Over the stand-in, parts take another time than on a device.
    let expected = (!is_stand_in).then(|| Duration::from_secs(seconds));
    let steps = parts.iter().filter(chosen).count();
    let progress = progress::Progress::of(steps, expected);
    for part in parts.iter().filter(chosen) {
        let log = report.part_begins(part)?;
        progress.begins(&part.name);
        let (began, expected) = (Instant::now(), Duration::from_secs(part.seconds));
        let outcome = match (missing.why(part.needs), limit(expected, budget)) {
            (Some(why), _) => Outcome::without_failures(Verdict::Skipped, why),
            (None, None) => {
                let left = budget.map_or(Duration::ZERO, Deadline::left).as_secs();
                let why = format!("{left} s of the budget are left, of {} s", part.seconds);
                Outcome::without_failures(Verdict::LeftOut, why)
            }
            (None, Some(limit)) => {
                let mut command = kit.command_of(part, &options.python, is_stand_in)?;
                command.env("NO_COLOR", "1");
                match process::run_logged(command, limit, log) {
                    Ok(finished) => judge(part, &finished, is_stand_in, &mut report)?,
                    Err(error) => Outcome::failed(error.to_string()),
                }
            }
        };
        progress.took(began.elapsed(), expected);
        report.part_ended(part, began.elapsed(), outcome)?;
    }
    drop(progress);
    Ok(report.end())
}

/// Returns the time limit of a part that takes about as long as `expected`; `None` if less is left
/// of the budget.
fn limit(expected: Duration, budget: Option<Deadline>) -> Option<Duration> {
    let Some(budget) = budget else { return Some(LIMIT) };
    let left = budget.left();
    (left >= expected).then(|| left.min(PATIENCE * expected))
}

/// Judges the output of a part, and adds its figures to the report.
fn judge(
    part: &Part,
    finished: &Finished,
    is_stand_in: bool,
    report: &mut Report,
) -> Result<Outcome> {
    // A library that calls the driver itself need not work with the stand-in.
    let may_fail = is_stand_in && !part.needs.works_with_the_stand_in();
    match &part.action {
        Action::Tests { .. } => Ok(of_tests(finished, may_fail)),
        Action::Nixl { .. } => Ok(of_script(finished)),
        Action::Bench(_) if may_fail && !finished.succeeded() => {
            Ok(Outcome::without_failures(Verdict::Skipped, NOT_REACHED))
        }
        Action::Bench(_) => of_bench(part, finished, is_stand_in, report),
    }
}

fn of_tests(finished: &Finished, may_skip: bool) -> Outcome {
    let Progress { passed, skipped, mut failures } = Progress::of(&finished.output);
    if finished.succeeded() {
        failures.clear(); // lines of a passed test that look like verdicts
    }
    let mut details = format!("{passed} passed, {} failed, {skipped} skipped", failures.len());
    if !finished.succeeded() {
        details += &format!("; {}", finished.end);
        if failures.is_empty() {
            failures.push(finished.end.to_string());
        }
    } else if passed == 0 && may_skip && skipped > 0 {
        return Outcome::without_failures(Verdict::Skipped, NOT_REACHED);
    } else if passed == 0 {
        failures.push("no test ran".to_owned());
    }
    Outcome { verdict: verdict(&failures), details, failures }
}

fn of_script(finished: &Finished) -> Outcome {
    if finished.succeeded() && finished.output.lines().any(|line| line == "passed") {
        return Outcome::without_failures(Verdict::Passed, "the bytes are right");
    }
    let last = finished.output.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    Outcome::failed(format!("{}: {last}", finished.end))
}

/// A real device's figures are compared with the bars.
fn of_bench(
    part: &Part,
    finished: &Finished,
    is_stand_in: bool,
    report: &mut Report,
) -> Result<Outcome> {
    // A bench that was killed may have printed half a line.
    let lines = lines(&finished.output).unwrap_or_default();
    report.figures(&lines)?;
    let mut failures = Vec::new();
    if !finished.succeeded() {
        let last = finished.output.lines().last().unwrap_or_default();
        failures.push(format!("{}: {last}", finished.end));
    }
    for bar in part.bars.iter().filter(|_| finished.succeeded() && !is_stand_in) {
        match bar.figure(&lines, "ratio").map(|figure| bar.row(vec![figure])) {
            Ok((row, held)) => {
                failures.extend((!held).then(|| format!("missed: {}", bar.what)));
                report.bar(row);
            }
            Err(why) => failures.push(why.to_string()),
        }
    }
    let details = format!("{} figures", lines.len());
    Ok(Outcome { verdict: verdict(&failures), details, failures })
}

fn verdict(failures: &[String]) -> Verdict {
    if failures.is_empty() { Verdict::Passed } else { Verdict::Failed }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;
    use crate::process::End;

    #[test]
    fn a_part_starts_only_if_it_fits_the_budget_and_gets_three_times_as_long() {
        let seconds = Duration::from_secs;
        assert_eq!(limit(seconds(5), None), Some(LIMIT));
        let budget = Some(Deadline::after(seconds(1000)));
        assert_eq!(limit(seconds(50), budget), Some(seconds(150)));
        assert!(limit(seconds(900), budget).is_some_and(|limit| limit <= seconds(1000)));
        assert_eq!(limit(seconds(1001), budget), None);
    }

    #[test]
    fn a_killed_part_reports_what_had_passed() {
        let output = "test P1 ... ok\ntest P2 ... ok\n".to_owned();
        let end = End::TimedOut(Duration::from_secs(9));
        let outcome = of_tests(&Finished { end, output }, false);
        assert_eq!(outcome.verdict, Verdict::Failed);
        assert!(
            outcome.details.starts_with("2 passed, 0 failed, 0 skipped; killed"),
            "{outcome:?}"
        );
    }

    #[test]
    fn parts_in_which_nothing_ran_have_not_passed() {
        let ended = |output: &str| Finished {
            end: End::Exited(ExitStatus::from_raw(0)),
            output: output.to_owned(),
        };
        let none = "SKIP a: b\ntest result: ok. 0 passed; 0 failed; 0 ignored\n";
        assert_eq!(of_tests(&ended(none), false).verdict, Verdict::Failed);
        assert_eq!(of_tests(&ended(none), true).verdict, Verdict::Skipped);
        assert_eq!(of_script(&ended("")).verdict, Verdict::Failed);
        assert_eq!(of_script(&ended("a log\npassed\na peer's log\n")).verdict, Verdict::Passed);
    }
}
