//! The process of a rank, which joins, registers a pool, and executes commands that arrive line by
//! line. Or the process of an engine.

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvx_connector::Rank;
use kvx_stand_in::Control;
use kvx_vllm::engine::WorkerRank;

use super::fleet::{OVER_TCP, group};
use crate::runtime::rig::{LIMIT, Part, builder, caches, pool_of, registry};

/// The variable that tells a process of this program its rank: the socket, the rank, the number of
/// ranks, and the number of blocks.
pub(crate) const VARIABLE: &str = "KVX_TEST_RANK";

/// Joins and serves until standard input ends.
pub(crate) fn serve(spec: &str) {
    let [path, rank, tp, blocks] = spec.split(' ').collect::<Vec<_>>()[..] else {
        return lead(spec);
    };
    let (rank, tp, blocks): (u32, u32, u32) =
        (rank.parse().unwrap(), tp.parse().unwrap(), blocks.parse().unwrap());
    let worker = WorkerRank { pp: 0, tp: rank };
    let joined = match path.strip_prefix(OVER_TCP) {
        Some(address) => Rank::join_over_tcp(address, worker, registry(), LIMIT),
        None => Rank::join(path, worker, registry(), LIMIT),
    };
    let joined = match joined {
        Ok(joined) => joined,
        Err(error) => return answer(&error.to_string()),
    };
    let (mut memory, mut blocks) = (pool_of(tp, blocks.max(1)), blocks);
    if blocks > 0 {
        match joined.register(caches(&memory, tp), [Arc::clone(&memory)]) {
            Ok(()) => answer("ready"),
            Err(error) => return answer(&error.to_string()),
        }
    } else {
        answer("joined");
    }
    let mut stand_in = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let numbers = |text: &str| -> Vec<u32> {
            text.split(',').map(|word| word.parse().unwrap()).collect()
        };
        let part = Part { pool: &memory, tp, rank: rank % tp, blocks };
        match words[..] {
            ["compute", request, blocks, tokens] => {
                part.compute(request.parse().unwrap(), &numbers(blocks), tokens.parse().unwrap());
                answer("done");
            }
            ["wrong", request, blocks, from, to] => {
                let tokens = from.parse().unwrap()..to.parse().unwrap();
                answer(&part.wrong(request.parse().unwrap(), &numbers(blocks), tokens).to_string());
            }
            ["calls", function] => {
                answer(&stand_in.get_or_insert_with(Control::open).calls(function).to_string());
            }
            ["ended"] => answer(&match joined.ended_blocking(Duration::from_secs(5)) {
                None => "it goes on".to_owned(),
                Some(Ok(())) => "ended".to_owned(),
                Some(Err(error)) => error.to_string(),
            }),
            // Other memory, of `blocks` blocks.
            ["register", count] => {
                blocks = count.parse().unwrap();
                memory = pool_of(tp, blocks);
                match joined.register(caches(&memory, tp), [Arc::clone(&memory)]) {
                    Ok(()) => answer("ready"),
                    Err(error) => answer(&error.to_string()),
                }
            }
            ["give_back", millis] => {
                let limit = Duration::from_millis(millis.parse().unwrap());
                let given = joined.give_back(limit).wait_blocking(LIMIT);
                answer(&given.map_or_else(
                    |error| format!("{:?}: {error}", error.kind()),
                    |()| "given back".into(),
                ));
            }
            ["leave"] => answer(&format!("{:?}", joined.leave(LIMIT).wait_blocking(LIMIT))),
            _ => panic!("{line}"),
        }
    }
}

fn answer(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

/// Runs an engine until the process is killed. `spec` is the path at which its rank joins, after
/// the number of ranks if there are several.
fn lead(spec: &str) {
    let (ranks, path) =
        spec.split_once(' ').map_or((1, spec), |(ranks, path)| (ranks.parse().unwrap(), path));
    let connector = builder("engine", "{}").workers(ranks, 1).build_blocking().unwrap();
    let whole = group(&connector, Path::new(path), LIMIT * 6);
    if ranks > 1 {
        answer("listens");
    } else {
        whole.wait_blocking(LIMIT).unwrap();
        answer("whole");
    }
    std::io::stdin().lines().for_each(drop);
}
