//! Which test program runs when: side by side, longest first; what wants the machine for itself comes last.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::programs::TestProgram;
use super::tier::Tier;

/// How many programs run at a time. Most of them wait most of the time; those that work start two threads for it.
pub(crate) fn lanes() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2))
}

/// How long each program took when it last ran in a tier: a line each, in a file below the target directory.
pub(crate) struct Seconds {
    file: PathBuf,
    known: BTreeMap<String, f64>,
}

impl Seconds {
    /// What is known. Nothing is lost with the file but order.
    pub(crate) fn load(target: &Path, tier: Tier) -> Seconds {
        let file = target.join("xtask").join("seconds").join(tier.name());
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let entries = text.lines().filter_map(|line| line.trim().split_once(' '));
        let known = entries.filter_map(|(seconds, title)| Some((title.to_owned(), seconds.parse().ok()?)));
        Seconds { known: known.collect(), file }
    }

    /// How long the program is expected to take.
    fn of(&self, program: &TestProgram) -> f64 {
        self.known.get(&program.title).copied().unwrap_or(program.guess)
    }

    /// Remembers how long a program took.
    pub(crate) fn note(&mut self, title: &str, seconds: f64) {
        self.known.insert(title.to_owned(), seconds);
    }

    /// Writes it down for the next run.
    pub(crate) fn save(&self) -> std::io::Result<()> {
        let lines = self.known.iter().map(|(title, seconds)| format!("{seconds:.1} {title}\n"));
        if let Some(folder) = self.file.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(&self.file, lines.collect::<String>())
    }
}

/// The programs in the order in which they start: those that run side by side, then those that run alone.
pub(crate) fn order(
    mut programs: Vec<TestProgram>,
    seconds: &Seconds,
) -> (Vec<TestProgram>, Vec<TestProgram>) {
    programs.sort_by(|one, other| seconds.of(other).total_cmp(&seconds.of(one)));
    programs.into_iter().partition(|program| !program.alone)
}

/// Calls `run` with each of `programs`, in their order, on so many threads, and returns what it answered.
pub(crate) fn side_by_side<T: Send>(
    programs: Vec<TestProgram>,
    lanes: usize,
    run: impl Fn(TestProgram) -> T + Sync,
) -> Vec<T> {
    let (queue, answers) = (Mutex::new(programs.into_iter()), Mutex::new(Vec::new()));
    // Without a poisoned lock: neither is held while `run` runs.
    let next = || queue.lock().ok()?.next();
    std::thread::scope(|scope| {
        for _ in 0..lanes {
            scope.spawn(|| {
                while let Some(program) = next() {
                    let answer = run(program);
                    answers.lock().expect("nothing panics under this lock").push(answer);
                }
            });
        }
    });
    answers.into_inner().expect("nothing panics under this lock")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn program(title: &str, guess: f64, alone: bool) -> TestProgram {
        let mut program = TestProgram::of_nothing(title);
        (program.guess, program.alone) = (guess, alone);
        program
    }

    fn titles(programs: &[TestProgram]) -> Vec<&str> {
        programs.iter().map(|program| program.title.as_str()).collect()
    }

    #[test]
    fn the_longest_starts_first_and_what_runs_alone_comes_last() {
        let folder = std::env::temp_dir().join(format!("kvx-xtask-seconds-{}", std::process::id()));
        let mut seconds = Seconds::load(&folder, Tier::Usual);
        seconds.note("-p was --lib", 7.0);
        seconds.note("-p once long --lib", 0.5);
        seconds.save().unwrap();
        let seconds = Seconds::load(&folder, Tier::Usual);
        let programs = vec![
            program("-p once long --lib", 100.0, false),
            program("-p alone --lib", 50.0, true),
            program("-p guessed --lib", 5.0, false),
            program("-p was --lib", 1.0, false),
        ];
        let (shared, alone) = order(programs, &seconds);
        assert_eq!(titles(&shared), ["-p was --lib", "-p guessed --lib", "-p once long --lib"]);
        assert_eq!(titles(&alone), ["-p alone --lib"]);
        assert!(Seconds::load(&folder, Tier::Whole).known.is_empty(), "each tier has its own times");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn no_more_run_at_a_time_than_there_are_lanes_and_each_runs_once() {
        let programs: Vec<_> = (0..20).map(|i| program(&i.to_string(), 1.0, false)).collect();
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let mut ran = side_by_side(programs.clone(), 3, |program| {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            running.fetch_sub(1, Ordering::SeqCst);
            program.title
        });
        ran.sort_by_key(|title| title.parse::<usize>().unwrap());
        assert_eq!(ran, titles(&programs));
        assert!(most.into_inner() <= 3);
    }
}
