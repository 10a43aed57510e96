//! Tests of data parallel ranks on a second host, behind the one server that clients and the proxy
//! know.

use std::time::Instant;

use kvx_testkit::test;
use serde_json::{Value, json};

use crate::serve::hosts::{Host, Hosts};
use crate::serve::server::{LIMIT, greedy, model, prompt};

const HEAD: &str = "http://10.77.0.1:8000";
/// The header with which a client chooses the second rank.
const SECOND: &str = "x-data-parallel-rank: 1";
const COMPLETIONS: &str = "/v1/completions";

/// Runs `kvx` with these arguments on a host; peers reach its blocks at the host's address.
fn run(hosts: &mut Hosts, number: usize, words: &str, more: &[&str]) {
    let arguments: Vec<String> =
        words.split(' ').chain(more.iter().copied()).map(str::to_owned).collect();
    let own = ["VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_HOST_IP"]
        .map(|name| (name.to_owned(), Hosts::address(number)));
    let host = &mut hosts.each[number - 1];
    host.run(host.kvx(&arguments, &own, &std::env::temp_dir()));
}

fn tokens(host: &Host, url: &str, body: &Value) -> Value {
    let answer = host.curl(&format!("{url}{COMPLETIONS}"), Some(body)).expect("an answer");
    answer["choices"][0]["token_ids"].clone()
}

/// Returns the second rank's answer.
fn second_rank(host: &Host, body: &Value) -> (u16, String) {
    host.ask(&format!("{HEAD}{COMPLETIONS}"), Some(body), Some(SECOND))
}

/// Returns the number of answered requests of a rank, as the head reports them.
fn answered(host: &Host, rank: usize) -> f64 {
    host.metric(8000, "vllm:request_success_total", &format!("engine=\"{rank}\""))
}

/// A fleet: a head with a rank, a second host with another rank, and a third host with the decode,
/// the proxy and a single server.
struct Fleet {
    hosts: Hosts,
    folder: String,
    transfer: String,
}

impl Fleet {
    /// Starts the fleet; `prefill` is the proxy's argument for the head. Fails unless the proxy's
    /// answers equal the single server's, and both ranks have prefilled for it.
    fn start(kv_connector: &str, prefill: &str) -> Option<Fleet> {
        // The test reads the list of workers without a proof, as a vLLM would.
        let extra = json!({"backends": ["TCP"], "unauthenticated": ["MOONCAKE"]});
        let transfer = json!({"kv_connector": kv_connector, "kv_role": "kv_both", "kv_load_failure_policy": "fail",
                              "kv_connector_extra_config": extra});
        let folder = model(&["--arch", "llama"]).to_str().unwrap().to_owned();
        let mut fleet =
            Fleet { hosts: Hosts::for_this_test(3)?, folder, transfer: transfer.to_string() };
        // Start the second host first: it waits for its head.
        fleet.start_second();
        fleet.serve(1, "-dp 2 -dpl 1 -dpa 10.77.0.1");
        fleet.serve(3, "--port 8200");
        let Fleet { hosts, folder, .. } = &mut fleet;
        run(
            hosts,
            3,
            &format!("proxy --prefill {prefill} --decode http://10.77.0.3:8200 --port 8192"),
            &[],
        );
        run(hosts, 3, &format!("serve {folder} --port 8300 --served-model-name m"), &[]);
        let [head, _, decode] = &hosts.each[..] else { unreachable!("three hosts") };
        for (host, url) in
            [(decode, "localhost:8300"), (decode, "localhost:8200"), (head, "localhost:8000")]
        {
            host.wait(&format!("http://{url}/health"));
        }
        decode.wait("http://localhost:8192/ready");
        // The proxy knows only the head; blocks arrive from either host.
        for at in 0..4 {
            let body = greedy(&prompt(at, 30 + 5 * at), 8);
            let answer = tokens(decode, "http://localhost:8192", &body);
            assert_eq!(answer, tokens(decode, "http://localhost:8300", &body), "{at}");
        }
        assert_eq!([0, 1].map(|rank| answered(head, rank)), [2.0, 2.0]);
        Some(fleet)
    }

    fn serve(&mut self, host: usize, words: &str) {
        let transfer = [
            "--kv-transfer-config",
            self.transfer.as_str(),
            "--served-model-name",
            "m",
            "--host",
            "0.0.0.0",
        ];
        run(&mut self.hosts, host, &format!("serve {} {words}", self.folder), &transfer);
    }

    fn start_second(&mut self) {
        self.serve(2, "--headless -dp 2 -dpl 1 -dpr 1 -dpa 10.77.0.1");
    }
}

// vLLM guide R9: data-parallel ranks run on several hosts behind one head, and the proxy knows only
//     the head
#[test]
fn ranks_on_a_second_host_answer_behind_the_head() {
    let Some(mut fleet) = Fleet::start("NixlConnector", HEAD) else { return };
    let [head, second, decode] = &mut fleet.hosts.each[..] else { unreachable!("three hosts") };
    assert_eq!(decode.metric(8200, "vllm:nixl_bytes_transferred_count", ""), 4.0);

    // A stream from a chosen rank, and a request that the rank rejects with its own message.
    let body = greedy(&prompt(7, 40), 8);
    let right = tokens(decode, "http://localhost:8300", &body);
    assert_eq!(decode.streamed(&format!("{HEAD}{COMPLETIONS}"), &body, SECOND), right);
    let wrong = second_rank(decode, &json!({"prompt": 1.5}));
    assert_eq!(wrong.0, 400, "{wrong:?}");
    assert_eq!([0, 1].map(|rank| answered(head, rank)), [2.0, 3.0]);

    // A lost host: requests to its rank fail, and the other ranks serve requests without a rank.
    second.stop();
    let until = Instant::now() + LIMIT;
    let gone = loop {
        let gone = second_rank(decode, &body);
        if gone.0 == 500 || Instant::now() > until {
            break gone;
        }
    };
    assert!(gone.0 == 500 && gone.1.contains("rank 1 is lost"), "{gone:?}");
    for _ in 0..2 {
        assert_eq!(tokens(decode, HEAD, &body), right);
    }

    // After a restart it joins again.
    fleet.start_second();
    let [_, _, decode] = &fleet.hosts.each[..] else { unreachable!("three hosts") };
    let until = Instant::now() + LIMIT;
    let again = loop {
        let again = second_rank(decode, &body);
        if again.0 == 200 || Instant::now() > until {
            break again;
        }
    };
    assert_eq!(again.0, 200, "{again:?}");
}

// vLLM 56: data-parallel ranks on another host register at the head's bootstrap server
#[test]
fn ranks_on_a_second_host_register_at_the_heads_bootstrap_server() {
    let Some(fleet) = Fleet::start("MooncakeConnector", &format!("{HEAD} 8998")) else { return };
    let listed =
        fleet.hosts.each[2].curl("http://10.77.0.1:8998/query", None).expect("a list of workers");
    let address =
        |rank: &str| listed[rank]["worker_addr"]["0"]["0"].as_str().unwrap_or_default().to_owned();
    assert!(address("0").starts_with("tcp://10.77.0.1:"), "{listed}");
    assert!(address("1").starts_with("tcp://10.77.0.2:"), "{listed}");
}

#[test]
fn a_host_with_another_model_is_rejected_with_a_reason() {
    let Some(mut hosts) = Hosts::for_this_test(2) else { return };
    let folder = model(&["--arch", "llama"]);
    let folder = folder.to_str().unwrap();
    run(&mut hosts, 1, &format!("serve {folder} -dp 2 -dpl 1 -dpa 10.77.0.1"), &[]);
    let words = format!("serve {folder} --headless -dp 3 -dpl 1 -dpr 1 -dpa 10.77.0.1");
    let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
    let host = &hosts.each[1];
    let refused = kvx_testkit::output(&mut host.kvx(&words, &[], &std::env::temp_dir()), LIMIT);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("start both with the same"), "{said}");
}
