//! The cost of a choice among 256 instances: a prefill instance, and a decode instance that pairs
//! with it.
//!
//! `cargo bench -p kvx-proxy --bench choice -- --bars` prints one JSON object per line.

use std::hint::black_box;
use std::time::Instant;

use kvx_proxy::{Choice, Setup, bench::HealthyFleet};

const CHOICES: u32 = 20_000;
const ROUNDS: usize = 9;

/// Returns a number whose bits all depend on all of the given one's.
fn hash(number: u64) -> u64 {
    let half = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (half ^ half >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

fn main() -> Result<(), kvx_proxy::Error> {
    for (name, choice) in [
        ("cached", Choice::Cached),
        ("least-tokens", Choice::LeastTokens),
        ("round-robin", Choice::RoundRobin),
        ("prefix", Choice::Prefix),
    ] {
        let urls = |from: u32| {
            let urls = (from..from + 128).map(|port| format!("'http://127.0.0.1:{port}'"));
            urls.collect::<Vec<_>>().join(", ")
        };
        let text = format!("[[pool]]\nprefill = [{}]\ndecode = [{}]\n", urls(10_000), urls(20_000));
        let mut setup = Setup::from_toml(&text)?;
        setup.choice = choice;
        let fleet = HealthyFleet::new(&setup);
        let mut rounds: Vec<_> = (0..ROUNDS)
            .map(|_| {
                let start = Instant::now();
                for count in 0..CHOICES {
                    let prefix = u64::from(count.wrapping_mul(0x9e37_79b1));
                    // 8,192 tokens, of which all prompts share the first 1,024.
                    let chunk = |at| if at < 4 { at } else { prefix << 8 | at };
                    let chunks: [u64; 32] = std::array::from_fn(|at| hash(chunk(at as u64)));
                    assert!(black_box(fleet.choose_pair(8192, prefix, &chunks)));
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
    Ok(())
}
