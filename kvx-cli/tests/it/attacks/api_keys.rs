//! H6: an operator sets `VLLM_API_KEY` or another protection of vLLM's for `kvx serve`, which
//! ignores it silently, and clients need no key.

use kvx_testkit::{free_port, test};
use serde_json::json;

use crate::attacks::kvx;
use crate::serve::server::{Server, ServerArgs, greedy, model, prompt};

const COMPLETIONS: &str = "/v1/completions";

/// Returns the status of an answer to a client with this header.
fn status(server: &Server, path: &str, authorization: &str) -> u16 {
    let header = match authorization {
        "" => String::new(),
        value => format!("authorization: {value}\r\n"),
    };
    let body = greedy(&prompt(1, 20), 1);
    let (method, body) = match path {
        COMPLETIONS | "/tokenize" => ("POST", Some(&body)),
        _ => ("GET", None),
    };
    server.call_with(&header, method, path, body).0
}

#[test]
fn clients_without_the_key_of_vllm_api_key_get_no_answer() {
    let variables = [("VLLM_API_KEY", "hush")];
    let server = Server::start(
        &model(&["--arch", "llama"]),
        ServerArgs { arguments: &[], variables: &variables },
    );
    for path in [COMPLETIONS, "/v1/models", "/tokenize", "/nothing", "/v1/../v1/models"] {
        for wrong in ["", "Bearer", "Bearer hus", "Bearer hushh", "Basic hush", "hush"] {
            assert_eq!(status(&server, path, wrong), 401, "{path} {wrong}");
        }
    }
    for path in ["/health", "/ping", "/version", "/metrics"] {
        assert_eq!(status(&server, path, ""), 200, "{path}");
    }
    let (_, words) = server.call_with("", "POST", COMPLETIONS, Some(&json!({})));
    assert_eq!(words, r#"{"error":"Unauthorized"}"#);
    for right in ["Bearer hush", "bearer hush"] {
        assert_eq!(status(&server, COMPLETIONS, right), 200, "{right}");
    }
}

#[test]
fn keys_of_the_flag_replace_that_of_the_variable() {
    let arguments = ["--api-key", "one", "two"];
    let variables = [("VLLM_API_KEY", "hush")];
    let server = Server::start(
        &model(&["--arch", "llama"]),
        ServerArgs { arguments: &arguments, variables: &variables },
    );
    let asked =
        ["hush", "one", "two"].map(|key| status(&server, "/v1/models", &format!("Bearer {key}")));
    assert_eq!(asked, [401, 200, 200]);
}

/// The head checks the keys, and its hosts accept its requests.
#[test]
fn requests_for_a_joined_host_need_the_key_too() {
    let (model, port) = (model(&["--arch", "llama"]), free_port(1).unwrap().to_string());
    let variables = [("VLLM_API_KEY", "hush")];
    let start = |more: &[&str]| {
        let arguments = [&["-dp", "2", "-dpl", "1", "-dpp", &port][..], more].concat();
        Server::try_start(&model, ServerArgs { arguments: &arguments, variables: &variables })
    };
    let _host = start(&["-dpr", "1", "--headless"]);
    let head = start(&[]).listening();
    let ask = |headers: &str| {
        let headers = format!("x-data-parallel-rank: 1\r\n{headers}");
        head.call_with(&headers, "POST", COMPLETIONS, Some(&greedy(&prompt(1, 20), 1))).0
    };
    assert_eq!((ask(""), ask("authorization: Bearer hush\r\n")), (401, 200));
}

#[test]
fn protections_that_the_server_does_not_have_stop_the_start() {
    for (flags, words) in [
        (&["--ssl-keyfile", "k", "--ssl-certfile", "c"][..], "--ssl-keyfile is not supported"),
        (&["--middleware", "my.check"], "--middleware is not supported"),
        (&["--api-key", ""], "--api-key is empty"),
    ] {
        let folder = model(&["--arch", "llama"]);
        let (succeeded, said) = kvx(&[&["serve", folder.to_str().unwrap()], flags].concat());
        assert!(!succeeded && said.contains(words), "{flags:?}: {said}");
    }
    for (name, value, words) in [
        ("VLLM_API_KEY", "", "VLLM_API_KEY is empty"),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE is not supported"),
    ] {
        let told = ServerArgs { arguments: &[], variables: &[(name, value)] };
        let (status, said) = Server::try_start(&model(&["--arch", "llama"]), told).ended();
        assert!(!status.success() && said.contains(words), "{name}: {said}");
    }
}
