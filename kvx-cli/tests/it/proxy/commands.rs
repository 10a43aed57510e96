//! Tests of the command line: the toy proxies' arguments, `--check`, and `--compare`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};

use kvx_instance::{Connector, Fault, Instance, Leg, Script, Settings, answer_to};
use kvx_testkit::output;
use serde_json::{Value, json};

use crate::proxy::client::{CUT_OFF, Call, completion, prompt};
use crate::proxy::fleet::{Proxy, SetupFile};
use crate::proxy::recipes::COMPLETIONS;

pub(crate) fn kvx_proxy(arguments: &[&str]) -> Output {
    kvx_proxy_with(&[], arguments)
}

/// Runs `kvx proxy` with these variables in its environment.
pub(crate) fn kvx_proxy_with(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.envs(variables.iter().copied());
    output(command.arg("proxy").args(arguments).stdin(Stdio::null()), CUT_OFF * 3)
}

pub(crate) fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Fails unless requests are answered as by a single server, and every instance takes part.
pub(crate) async fn serves(proxy: &Proxy, prefill: &mut [Instance], decode: &mut [Instance]) {
    proxy.wait_until("/ready", "it is ready", |status, _| status == 200).await;
    let requests = (prefill.len().max(decode.len()) * 2) as u64;
    for count in 0..requests {
        let prompt = prompt(&format!("toy {count}"), 30);
        let answer = Call::post(proxy.port, COMPLETIONS, &completion(&prompt, 4)).send().await;
        assert_eq!(answer.texts(), [answer_to(&prompt, 4)]);
    }
    let prefills: Vec<_> = prefill.iter_mut().map(|instance| instance.report().prefills).collect();
    let decodes: Vec<_> = decode.iter_mut().map(|instance| instance.report().decodes).collect();
    assert_eq!((prefills.iter().sum::<u64>(), decodes.iter().sum::<u64>()), (requests, requests));
    assert!(prefills.iter().chain(&decodes).all(|count| *count > 0), "{prefills:?} {decodes:?}");
    assert!(prefill.iter_mut().chain(decode).all(|instance| instance.violations().is_empty()));
}

/// Starts `count` instances with this connector.
pub(crate) fn start(count: usize, connector: Connector) -> Vec<Instance> {
    (0..count).map(|_| Instance::start(Settings { connector, ..Settings::default() })).collect()
}

pub(crate) async fn the_command_line_of_toy_proxy_server_works_unchanged() {
    let (mut prefill, mut decode) = (start(2, Connector::Pull), start(2, Connector::Pull));
    let port = |instance: &Instance| instance.port().to_string();
    for (p, d) in [("s", "s"), ("", "")] {
        let flags = [
            format!("--prefiller-host{p}"),
            format!("--prefiller-port{p}"),
            format!("--decoder-host{d}"),
            format!("--decoder-port{d}"),
        ];
        let (p0, p1, d0, d1) =
            (port(&prefill[0]), port(&prefill[1]), port(&decode[0]), port(&decode[1]));
        let arguments = [
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            &flags[0],
            "127.0.0.1",
            "127.0.0.1",
            &flags[1],
            &p0,
            &p1,
            &flags[2],
            "127.0.0.1",
            "localhost",
            &flags[3],
            &d0,
            &d1,
        ];
        let proxy = Proxy::start(&arguments, &[]);
        prefill.iter_mut().chain(&mut decode).for_each(Instance::restart);
        serves(&proxy, &mut prefill, &mut decode).await;
    }
    let odd = kvx_proxy(&[
        "--port",
        "0",
        "--prefiller-hosts",
        "a",
        "b",
        "--prefiller-ports",
        "1",
        "--decoder-ports",
        "2",
    ]);
    assert!(!odd.status.success() && said(&odd).contains("prefill"), "{}", said(&odd));
}

pub(crate) async fn the_command_line_of_mooncake_connector_proxy_works_unchanged() {
    let (mut prefill, mut decode) = (start(2, Connector::Mooncake), start(1, Connector::Mooncake));
    let (urls, bootstraps): (Vec<_>, Vec<_>) = prefill
        .iter()
        .map(|instance| (instance.url(), instance.bootstrap_port().to_string()))
        .unzip();
    let url = decode[0].url();
    let arguments = [
        "--port",
        "0",
        "--prefill",
        &urls[0],
        &bootstraps[0],
        "--prefill",
        &urls[1],
        &bootstraps[1],
        "--decode",
        &url,
    ];
    let proxy = Proxy::start(&arguments, &[]);
    serves(&proxy, &mut prefill, &mut decode).await;
}

pub(crate) async fn check_explains_a_configuration_and_its_errors() {
    let (prefill, decode) = (start(1, Connector::Pull), start(1, Connector::Pull));
    let log = std::env::temp_dir().join(format!("kvx-proxy-{}.log", std::process::id()));
    let good = format!(
        "port = 0\naccess_log = {log:?}\n[[pool]]\nprefill = [\"{}\"]\ndecode = [\"{}\"]\n",
        prefill[0].url(),
        decode[0].url()
    );
    let file = SetupFile::new(&good);
    let output = kvx_proxy(&["--config", file.path(), "--check"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains(&prefill[0].url()[7..]), "{}", said(&output));
    assert!(!log.exists(), "a check leaves no log behind");
    let kept = SetupFile::new("a line\n");
    file.write(&good.replace(&format!("{log:?}"), &format!("{:?}", kept.path())));
    let output = kvx_proxy(&["--config", file.path(), "--check"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(std::fs::read_to_string(kept.path()).unwrap(), "a line\n", "nor changes one");
    let gone = "http://127.0.0.1:1";
    let busy = format!("port = {}\n", prefill[0].port());
    let no_folder = format!("{:?}", log.join("log"));
    for (wrong, word) in [
        (good.replace(&decode[0].url(), gone), "127.0.0.1:1"),
        (good.replace("prefill", "prefil"), "prefil"),
        (good.replace("http://", "ftp://"), "ftp"),
        (format!("porrt = 1\n{good}"), "porrt"),
        ("[[pool]]\n".to_owned(), "prefill"),
        (good.replace("port = 0\n", &busy), "cannot listen on 127.0.0.1:"),
        (good.replace(&format!("{log:?}"), &no_folder), "cannot write the access log"),
    ] {
        file.write(&wrong);
        let output = kvx_proxy(&["--config", file.path(), "--check"]);
        assert_eq!(output.status.code(), Some(1), "{wrong}: {}", said(&output));
        assert!(said(&output).contains(word), "{wrong}: {}", said(&output));
    }
}

pub(crate) async fn compare_distinguishes_equal_endpoints_from_others() {
    let (one, mut two) =
        (Instance::start(Settings::default()), Instance::start(Settings::default()));
    let (first, second) = (one.url(), two.url());
    let output = kvx_proxy(&["--compare", &first, &second]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    two.script(Script { leg: Some(Leg::Alone), times: 1, fault: Fault::Status(500) });
    let output = kvx_proxy(&["--compare", &first, &second]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(one.port() > 0);
}

/// Starts an endpoint below a base path that answers each prompt with its length, except for the
/// length `odd`.
fn endpoint(base: &'static str, odd: Option<usize>) -> String {
    endpoint_that(base, move |asked| (200, answer_of(asked, odd)))
}

fn answer_of(asked: &Value, odd: Option<usize>) -> Value {
    let tokens = asked["prompt"].as_array().map(Vec::len);
    let text = match &asked["prompt"] {
        _ if tokens.is_some() && tokens == odd => "another".to_owned(),
        prompt => prompt.to_string().len().to_string(),
    };
    json!({"choices": [{"text": text}]})
}

/// Starts an endpoint below a base path that answers completions in this way. Returns its URL,
/// including the base. It ends with this program.
fn endpoint_that(
    base: &'static str,
    said: impl Fn(&Value) -> (u16, Value) + Send + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            // An error: the client has disconnected.
            let _ = answer(&stream, base, &said);
        }
    });
    format!("http://{address}{base}")
}

fn answer(
    mut stream: &TcpStream,
    base: &str,
    said: &impl Fn(&Value) -> (u16, Value),
) -> std::io::Result<()> {
    stream.set_read_timeout(Some(CUT_OFF))?;
    let mut reader = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head)? > 0 {
        let line = head.lines().last().unwrap_or_default().to_ascii_lowercase();
        length = line
            .strip_prefix("content-length:")
            .map_or(length, |text| text.trim().parse().unwrap());
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (status, said) = match head.split(' ').nth(1).and_then(|path| path.strip_prefix(base)) {
        Some("/v1/models") => (200, json!({"data": [{"id": "m"}]})),
        Some("/v1/completions") if asked["model"] == "m" => said(&asked),
        _ => (404, json!({"error": {"message": head}})),
    };
    let said = said.to_string();
    let length = said.len();
    write!(
        stream,
        "HTTP/1.1 {status} Said\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{said}"
    )
}

pub(crate) async fn compare_exits_1_on_another_text_and_0_on_the_same() {
    let (one, same) = (endpoint("", None), endpoint("/some/where", None));
    let output = kvx_proxy(&["--compare", &one, &same]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(said(&output).contains("the same answers") && !said(&output).contains("DIFFERENT"));
    // In the form that OpenAI's clients use.
    let output = kvx_proxy(&["--compare", &format!("{same}/v1"), &one]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    // Each of these lengths is tested, and no other answer hides the difference.
    for odd in [17, 33, 49, 2000] {
        let output = kvx_proxy(&["--compare", &one, &endpoint("", Some(odd))]);
        assert_eq!(output.status.code(), Some(1), "{odd}: {}", said(&output));
        let different = said(&output).lines().filter(|line| line.starts_with("DIFFERENT")).count();
        assert_eq!(different, 1, "{odd}: {}", said(&output));
        assert!(
            said(&output).contains(&format!("DIFFERENT  \"{odd} token ids\"")),
            "{}",
            said(&output)
        );
        assert!(said(&output).contains(": \"another\"\n"), "{}", said(&output));
    }
    for (url, why) in [(one.replace("http", "ftp"), "scheme"), (format!("{one}?x"), "query")] {
        let output = kvx_proxy(&["--compare", &one, &url]);
        assert_eq!(output.status.code(), Some(1), "{url}: {}", said(&output));
        assert!(
            said(&output).contains(why) && said(&output).contains("http://HOST:PORT"),
            "{}",
            said(&output)
        );
    }
}

/// Runs `kvx proxy --compare`, and returns its exit status and its output.
fn compared(one: &str, other: &str) -> (Option<i32>, String) {
    let output = kvx_proxy(&["--compare", one, other]);
    (output.status.code(), said(&output))
}

pub(crate) async fn compare_uses_token_ids_where_both_endpoints_return_them() {
    let with_ids = |ids: Value| {
        endpoint_that("", move |asked| {
            let mut answer = answer_of(asked, None);
            if asked["return_token_ids"] == true {
                answer["choices"][0]["token_ids"] = ids.clone();
            }
            (200, answer)
        })
    };
    let (one, same) = (with_ids(json!([1, 2, 3])), with_ids(json!([1, 2, 3])));
    let (status, said) = compared(&one, &same);
    assert!(said.contains("25 prompts, the same answers, 25 compared by token ids"), "{said}");
    assert_eq!(status, Some(0));
    // The texts are equal.
    let (status, said) = compared(&one, &with_ids(json!([1, 2, 4])));
    assert!(said.contains("the token ids differ from token 3 on"), "{said}");
    assert_eq!(status, Some(1), "{said}");
    // An endpoint that returns none, or rejects the request for them, is compared by text.
    let strict = endpoint_that("", |asked| match asked["return_token_ids"].is_null() {
        true => (200, answer_of(asked, None)),
        false => (400, json!({"error": {"message": "return_token_ids: unknown"}})),
    });
    for other in [endpoint("", None), strict] {
        let (status, said) = compared(&one, &other);
        assert!(said.contains("25 prompts, the same answers\n"), "{said}");
        assert_eq!(status, Some(0), "{said}");
    }
}

pub(crate) async fn compare_counts_equal_errors_as_equal_and_says_so() {
    // Rejects the prompt of 2,000 token ids.
    let short = |message: &'static str| {
        endpoint_that("", move |asked| match asked["prompt"].as_array().map(Vec::len) {
            Some(2000) => (400, json!({"error": {"message": message}})),
            _ => (200, answer_of(asked, None)),
        })
    };
    let (one, same) = (short("too long"), short("too long"));
    let (status, said) = compared(&one, &same);
    assert!(said.contains("same error \"2000 token ids\": status 400: too long\n"), "{said}");
    assert!(said.contains("25 prompts, the same answers, 1 of them the same error"), "{said}");
    assert_eq!(status, Some(0), "{said}");
    for other in [short("much too long"), endpoint("", None)] {
        let (status, said) = compared(&one, &other);
        assert!(said.contains("DIFFERENT  \"2000 token ids\""), "{said}");
        assert_eq!(status, Some(1), "{said}");
    }
    // Without an answer, or without an endpoint, the comparison shows no equality.
    let broken = || endpoint_that("", |_| (500, json!({"error": {"message": "broken"}})));
    let (status, said) = compared(&broken(), &broken());
    assert!(said.contains("answered every prompt with the same error"), "{said}");
    assert_eq!(status, Some(1), "{said}");
    let output =
        kvx_proxy(&["--compare", "http://127.0.0.1:1", "http://127.0.0.1:1", "--model", "m"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}
