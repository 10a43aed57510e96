//! Tests the engine with a model that detects every wrong block.

mod model;
mod transfers;

use std::sync::Arc;
use std::time::Duration;

use self::model::{Memory, expected, logits};
use super::*;
use crate::kv::Outcome;
use crate::tokenizer::tests::bytes;

const LIMIT: Duration = Duration::from_secs(10);

fn limits(blocks: usize) -> Limits {
    Limits {
        block_size: 4,
        blocks,
        model_len: 64.min(blocks * 4),
        requests: 8,
        step_tokens: 16,
        raw_logits: false,
        prefix_cache: true,
        engine: 0,
    }
}

fn start(limits: &Limits) -> (Running, Memory) {
    let memory = Memory::new(limits.blocks, limits.block_size);
    let running =
        Engine::start(limits.clone(), Box::new(memory.clone()), Arc::new(bytes()), None, |_| {
            Ok(Box::new(NoMover))
        });
    (running.expect("the engine starts"), memory)
}

fn request(name: &str, prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        name: name.to_owned(),
        prompt: prompt.to_vec(),
        sampling: Sampling::greedy(),
        max_tokens,
        min_tokens: 0,
        ends: vec![256],
        stop_tokens: Vec::new(),
        stop: Vec::new(),
        include_stop: false,
        skip_special: true,
        logprobs: None,
        prompt_logprobs: None,
        transfer: None,
    }
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| 97 + (seed * 7 + at * 5) % 26).collect()
}

/// Joins all pieces of an answer.
fn whole(mut answer: Answer) -> std::result::Result<Piece, Failure> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let mut whole = Piece::default();
        while whole.end.is_none() {
            let told = tokio::time::timeout(LIMIT, answer.next())
                .await
                .expect("the engine answers in time");
            let piece = told.expect("an answer has an end")?;
            whole.text += &piece.text;
            whole.tokens.extend(piece.tokens);
            whole.prompt_logprobs.extend(piece.prompt_logprobs);
            whole.cached = whole.cached.max(piece.cached);
            whole.end = piece.end;
        }
        Ok(whole)
    })
}

fn tokens(piece: &Piece) -> Vec<u32> {
    piece.tokens.iter().map(|(token, _)| *token).collect()
}

fn text(tokens: &[u32]) -> String {
    tokens.iter().map(|token| char::from(*token as u8)).collect()
}

#[test]
fn answers_are_right_for_prompts_of_every_length() {
    let (running, _) = start(&limits(16));
    for len in 1..=40 {
        let prompt = prompt(len, len);
        let answer =
            whole(running.engine().submit(request(&format!("r{len}"), &prompt, 9))).unwrap();
        let right = expected(&prompt, 9);
        assert_eq!((tokens(&answer), answer.text), (right.clone(), text(&right)), "{len}");
        assert_eq!(answer.end.unwrap().reason, FinishReason::Length);
    }
    running.stop(true).unwrap();
}

#[test]
fn long_prompts_are_computed_in_chunks_while_others_decode() {
    let (running, memory) = start(&limits(32));
    let (long, short) = (prompt(1, 50), prompt(2, 3));
    let held = memory.lock(); // no step ends before both have arrived
    let answers = [("short", &short, 12), ("long", &long, 3)]
        .map(|(name, prompt, count)| running.engine().submit(request(name, prompt, count)));
    drop(held);
    let [first, second] = answers.map(|answer| whole(answer).unwrap());
    assert_eq!((tokens(&first), tokens(&second)), (expected(&short, 12), expected(&long, 3)));
    let inner = memory.lock();
    assert!(inner.steps.iter().all(|tokens| *tokens <= 16), "{:?}", inner.steps);
    assert_eq!(inner.widest, 2);
}

#[test]
fn a_hundred_requests_share_too_few_blocks_and_all_are_right() {
    let (running, memory) = start(&Limits { requests: 100, step_tokens: 64, ..limits(24) });
    let prompts: Vec<Vec<u32>> = (0..100).map(|seed| prompt(seed, 1 + seed % 23)).collect();
    let held = memory.lock(); // no step ends before all have arrived
    let answers: Vec<Answer> = prompts
        .iter()
        .enumerate()
        .map(|(at, prompt)| running.engine().submit(request(&format!("r{at}"), prompt, 30)))
        .collect();
    drop(held);
    for (prompt, answer) in prompts.iter().zip(answers) {
        assert_eq!(tokens(&whole(answer).unwrap()), expected(prompt, 30));
    }
    let computed = memory.lock().computed;
    let bare: usize = prompts.iter().map(|prompt| prompt.len() + 29).sum();
    assert!(computed > bare, "no request was preempted: {computed} tokens computed, {bare} needed");
}

#[test]
fn a_preemption_does_not_change_the_sampled_tokens() {
    let drawn = |blocks| {
        let (running, _) = start(&limits(blocks));
        let sampling = |seed| Sampling { seed, ..Sampling::default() };
        let answers: Vec<Answer> = (0..6u32)
            .map(|seed| {
                let request = request(&format!("r{seed}"), &prompt(9, 5), 25);
                running.engine().submit(Request { sampling: sampling(seed.into()), ..request })
            })
            .collect();
        answers.into_iter().map(|answer| tokens(&whole(answer).unwrap())).collect::<Vec<_>>()
    };
    let roomy = drawn(64);
    assert_eq!(roomy, drawn(10));
    assert_ne!(roomy[0], roomy[1]);
}

#[test]
fn cached_tokens_are_not_recomputed() {
    let (running, memory) = start(&limits(16));
    let long = prompt(3, 22);
    whole(running.engine().submit(request("first", &long, 1))).unwrap();
    assert_eq!(memory.lock().computed, 22);
    let again = whole(running.engine().submit(request("again", &long, 4))).unwrap();
    assert_eq!((tokens(&again), again.cached), (expected(&long, 4), 20));
    assert_eq!(memory.lock().computed, 22 + 2 + 3);
    // For a prompt of whole blocks, the last token is recomputed for its logits.
    let cut = whole(running.engine().submit(request("cut", &long[..20], 1))).unwrap();
    assert_eq!((tokens(&cut), cut.cached), (expected(&long[..20], 1), 16));
}

#[test]
fn without_the_cache_everything_is_computed() {
    let (running, memory) = start(&Limits { prefix_cache: false, ..limits(16) });
    for name in ["one", "two"] {
        assert_eq!(
            whole(running.engine().submit(request(name, &prompt(3, 22), 1))).unwrap().cached,
            0
        );
    }
    assert_eq!(memory.lock().computed, 44);
}

#[test]
fn stops_end_an_answer() {
    let (running, _) = start(&limits(16));
    let prompt = prompt(4, 6);
    let right = expected(&prompt, 20);
    let said = text(&right);
    let ask = |name: &str, change: &dyn Fn(&mut Request)| {
        let mut request = request(name, &prompt, 20);
        change(&mut request);
        whole(running.engine().submit(request)).unwrap()
    };
    let stop = said[6..9].to_owned();
    let at = said.find(&stop).unwrap();
    let stopped = ask("text", &|request| request.stop = vec![stop.clone()]);
    assert_eq!(
        (stopped.text.as_str(), stopped.end.unwrap().reason),
        (&said[..at], FinishReason::Stop(stop.clone()))
    );
    assert_eq!(stopped.tokens.len(), at + 3);
    let included = ask("included", &|request| {
        (request.stop, request.include_stop) = (vec![stop.clone()], true)
    });
    assert_eq!(included.text, said[..at + 3]);

    let token = right[7];
    let first = right.iter().position(|other| *other == token).unwrap();
    let by_token = ask("token", &|request| request.stop_tokens = vec![token]);
    assert_eq!(
        (by_token.text.as_str(), by_token.end.unwrap().reason),
        (&said[..first], FinishReason::StopToken(token))
    );
    let ended = ask("end", &|request| request.ends = vec![token]);
    assert_eq!(
        (ended.text.as_str(), ended.end.unwrap().reason),
        (&said[..first], FinishReason::EndOfText)
    );
    // `min_tokens` prevents the token from being sampled at all.
    let later = ask("later", &|request| (request.ends, request.min_tokens) = (vec![token], 15));
    assert!(later.tokens.len() >= 15 && !tokens(&later)[..15].contains(&token), "{later:?}");
}

#[test]
fn logprobs_are_those_of_the_model() {
    let (running, _) = start(&limits(16));
    let prompt = prompt(5, 9);
    // The second request must not use the cache, because it needs the prompt's logits.
    for name in ["one", "two"] {
        let mut request = request(name, &prompt, 3);
        (request.logprobs, request.prompt_logprobs) = (Some(2), Some(0));
        let answer = whole(running.engine().submit(request)).unwrap();
        let right = expected(&prompt, 3);
        let all: Vec<u32> = prompt.iter().chain(&right).copied().collect();
        for (at, (token, logprob)) in answer.tokens.iter().enumerate() {
            let logits = logits(all[..9 + at].iter().copied());
            assert_eq!(logprob.as_ref(), Some(&Logprob::of(&logits, *token, 2, false)));
        }
        assert_eq!(answer.prompt_logprobs.len(), 8);
        for (at, logprob) in answer.prompt_logprobs.iter().enumerate() {
            assert_eq!(
                *logprob,
                Logprob::of(&logits(all[..=at].iter().copied()), all[at + 1], 0, false)
            );
        }
    }
}

#[test]
fn a_client_that_disconnects_releases_its_blocks() {
    let (running, _) = start(&limits(8));
    for round in 0..20 {
        let mut answer =
            running.engine().submit(request(&format!("gone{round}"), &prompt(round, 20), 12));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            tokio::time::timeout(LIMIT, answer.next()).await.unwrap().unwrap().unwrap()
        });
    }
    let prompt = prompt(50, 28);
    assert_eq!(
        tokens(&whole(running.engine().submit(request("stays", &prompt, 4))).unwrap()),
        expected(&prompt, 4)
    );
}

#[test]
fn a_failure_of_the_model_fails_every_request_and_the_engine() {
    let (running, memory) = start(&limits(8));
    memory.lock().fails = true;
    let failure = whole(running.engine().submit(request("r", &prompt(1, 4), 2))).unwrap_err();
    assert!(failure.0.contains("failed"), "{failure:?}");
    let until = std::time::Instant::now() + LIMIT;
    while running.engine().is_alive() {
        assert!(std::time::Instant::now() < until, "the engine must end");
        std::thread::yield_now();
    }
    assert!(running.stop(false).unwrap_err().to_string().contains("as the test wants"));
}

#[test]
fn a_drained_engine_finishes_running_requests_and_accepts_no_new_ones() {
    let (running, _) = start(&limits(16));
    let prompt = prompt(6, 8);
    let answer = running.engine().submit(request("r", &prompt, 40));
    let engine = running.engine().clone();
    running.stop(true).unwrap();
    assert_eq!(tokens(&whole(answer).unwrap()), expected(&prompt, 40));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(engine.submit(request("late", &prompt, 1)).next()), None);
}

/// A mover that disconnects from its peers only when the other engine's mover does, too.
struct SlowMover {
    begins: Sender<()>,
    other: Receiver<()>,
}

impl Mover for SlowMover {
    fn on_request(&mut self, _: &str, _: usize, _: Option<&TransferParams>) {}

    fn matched_tokens(&self, _: &str, _: usize) -> usize {
        0
    }

    fn on_allocated(&mut self, _: &str, _: &[u32], _: usize, _: usize) {}

    fn step(&mut self) -> Vec<Outcome> {
        Vec::new()
    }

    fn on_finished(&mut self, _: FinishedRequest<'_>) -> (bool, Option<TransferParams>) {
        (false, None)
    }
}

impl Drop for SlowMover {
    fn drop(&mut self) {
        self.begins.send(()).unwrap();
        self.other.recv_timeout(LIMIT).expect("the other engine must end concurrently");
    }
}

#[test]
fn engines_that_are_stopped_together_disconnect_concurrently() {
    let ((begins, second), (other, first)) = (channel(), channel());
    let movers = [SlowMover { begins, other: first }, SlowMover { begins: other, other: second }];
    let engines = movers.map(|mover| {
        let memory = Box::new(Memory::new(16, 4));
        Engine::start(limits(16), memory, Arc::new(bytes()), None, |_| Ok(Box::new(mover))).unwrap()
    });
    Running::stop_all(Vec::from(engines)).unwrap();
}

#[test]
fn a_pool_that_is_too_small_is_rejected_with_a_remedy() {
    let memory = Memory::new(2, 4);
    let tiny = Limits { model_len: 64, ..limits(2) };
    let error =
        Engine::start(tiny, Box::new(memory), Arc::new(bytes()), None, |_| Ok(Box::new(NoMover)))
            .err()
            .unwrap();
    assert!(error.to_string().contains("--max-model-len to 8"), "{error}");
}
