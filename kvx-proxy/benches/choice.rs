//! The cost of a choice among 256 instances: a prefill instance, and a decode instance that pairs
//! with it.
//!
//! `cargo bench -p kvx-proxy --bench choice -- --bars` prints one JSON object per line.

use std::hint::black_box;
use std::time::Instant;

use kvx_proxy::bench::{HealthyFleet, TokenizedPrompt};
use kvx_proxy::{Choice, Setup};

const CHOICES: u32 = 20_000;
const ROUNDS: usize = 9;
/// The instances of each role.
const INSTANCES: usize = 128;
/// The tokens of a prompt, and those that all prompts share.
const TOKENS: u32 = 8192;
const SHARED: u32 = 1024;
/// The prompts that a prefill instance has cached.
const CACHED: usize = 10;

/// Returns a number whose bits all depend on all of the given one's.
fn hash(number: u64) -> u64 {
    let half = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (half ^ half >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

fn fleet(choice: Choice) -> Result<HealthyFleet, kvx_proxy::Error> {
    let urls = |from: usize| {
        let urls = (from..from + INSTANCES).map(|port| format!("'http://127.0.0.1:{port}'"));
        urls.collect::<Vec<_>>().join(", ")
    };
    let text = format!("[[pool]]\nprefill = [{}]\ndecode = [{}]\n", urls(10_000), urls(20_000));
    let mut setup = Setup::from_toml(&text)?;
    setup.choice = choice;
    Ok(HealthyFleet::new(&setup))
}

/// Prints the median time of a choice.
fn measure(name: &str, choose: impl Fn(u32) -> bool) {
    let mut rounds: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            for count in 0..CHOICES {
                assert!(black_box(choose(count)));
            }
            start.elapsed().as_secs_f64() * 1e6 / f64::from(CHOICES)
        })
        .collect();
    rounds.sort_unstable_by(f64::total_cmp);
    println!(
        "{{\"cost\":\"choice_us\",\"choice\":\"{name}\",\"value\":{:.3}}}",
        rounds[ROUNDS / 2]
    );
}

fn main() -> Result<(), kvx_proxy::Error> {
    for (name, choice) in [
        ("cached", Choice::Cached),
        ("least-tokens", Choice::LeastTokens),
        ("round-robin", Choice::RoundRobin),
        ("prefix", Choice::Prefix),
    ] {
        let fleet = fleet(choice)?;
        measure(name, |count| {
            let prefix = u64::from(count.wrapping_mul(0x9e37_79b1));
            let chunk =
                |at: u32| if at < SHARED / 256 { at.into() } else { prefix << 8 | u64::from(at) };
            let chunks: [u64; 32] = std::array::from_fn(|at| hash(chunk(at as u32)));
            fleet.choose_pair(TOKENS.into(), prefix, &chunks)
        });
    }
    let fleet = fleet(Choice::Cached)?;
    let token = |prompt: usize, at: u32| hash((prompt as u64) << 32 | u64::from(at)) as u32;
    let ids = |prompt: usize| -> Vec<u32> {
        (0..TOKENS).map(|at| token(if at < SHARED { 0 } else { prompt + 1 }, at)).collect()
    };
    for instance in 0..INSTANCES {
        let prompts: Vec<_> = (0..CACHED).map(|number| ids(instance * CACHED + number)).collect();
        fleet.cache(instance, &prompts);
    }
    // Every other prompt is cached somewhere.
    let prompts: Vec<_> = (0..256).map(|number| TokenizedPrompt::new(ids(10 * number))).collect();
    measure("events", |count| {
        fleet.choose_pair_by_events(&prompts[count as usize % prompts.len()])
    });
    Ok(())
}
