//! Tests of the page `/` in a browser, if the variable `KVX_BROWSER` names one, such as Debian's
//! `chromium`: a browser is too large to install for every run.

use std::ffi::OsString;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use kvx_instance::{Fault, Leg, Script, Settings};
use kvx_testkit::output;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::proxy::client::{CUT_OFF, Call, completion};
use crate::proxy::fleet::{Fleet, Plan};
use crate::proxy::recipes::COMPLETIONS;

/// The variable that names the browser.
const VARIABLE: &str = "KVX_BROWSER";

fn browser() -> Option<OsString> {
    std::env::var_os(VARIABLE).filter(|browser| !browser.is_empty())
}

/// Returns true if there is a browser. Otherwise prints which tests are left out.
pub(crate) fn has_browser_or_says() -> bool {
    let has = browser().is_some();
    if !has {
        eprintln!(
            "left out: the page in a browser; {VARIABLE} names one, Debian's `chromium` for example"
        );
    }
    has
}

pub(crate) async fn reports_that_it_is_left_out_without_a_browser() {
    let listed = |browser: &str| {
        let program = std::env::current_exe().expect("this program has a path");
        let listed = output(Command::new(program).arg("--list").env(VARIABLE, browser), CUT_OFF);
        (String::from_utf8_lossy(&listed.stdout).contains("in_a_browser"), listed.stderr)
    };
    let (has, said) = listed("");
    assert!(!has && String::from_utf8_lossy(&said).contains(VARIABLE), "{}", said.escape_ascii());
    let (has, said) = listed("chromium");
    assert!(has && !String::from_utf8_lossy(&said).contains(VARIABLE), "{}", said.escape_ascii());
}

/// Returns the page's document after its script has run for some seconds of virtual time.
fn rendered(browser: &OsString, url: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let profile = std::env::temp_dir().join(format!("kvx-browser-{process}-{count}"));
    let output = output(
        Command::new(browser)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
            ])
            .args([
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ])
            .arg(format!("--user-data-dir={}", profile.display()))
            .args(["--virtual-time-budget=4000", "--dump-dom", url]),
        CUT_OFF * 5,
    );
    std::fs::remove_dir_all(profile).ok(); // an error: the browser has created none
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the text of the first element with this id.
fn text<'a>(page: &'a str, id: &str) -> &'a str {
    let start = page.find(&format!("id=\"{id}\"")).unwrap_or_else(|| panic!("no {id}: {page}"));
    let inner = &page[start..];
    let inner = &inner[inner.find('>').map_or(0, |end| end + 1)..];
    &inner[..inner.find("</").unwrap_or(inner.len())]
}

pub(crate) async fn shows_instances_requests_and_errors_in_a_browser() {
    let browser = browser().expect("it is only run with one");
    let setup = "[health]\nevery = \"60s\"\neject_after = 1000\n[retries]\nattempts = 1\n";
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup(setup).start().await;
    for _ in 0..3 {
        let answer =
            Call::post(fleet.port(), COMPLETIONS, &completion("for the page, for the page", 2))
                .send()
                .await;
        assert_eq!(answer.status, 200);
    }
    fleet.prefill[0].script(Script { leg: Some(Leg::Prefill), times: 1, fault: Fault::CloseFirst });
    let failed =
        Call::post(fleet.port(), COMPLETIONS, &completion("for the page, for the page", 2))
            .send()
            .await;
    assert!(failed.status >= 500);
    let page = rendered(&browser, &format!("http://127.0.0.1:{}/", fleet.port()));
    assert_eq!(text(&page, "ready"), "is ready", "{page}");
    assert_eq!(text(&page, "total"), "4", "{page}");
    assert_eq!(text(&page, "in_flight"), "0", "{page}");
    for instance in [&fleet.prefill[0], &fleet.decode[0]] {
        assert!(page.contains(&format!("<td>{}</td>", &instance.url()[7..])), "{page}");
    }
    let errors = &page[page.find("id=\"errors\"").expect("a table of errors")..];
    assert!(
        errors.contains(&format!("<td>{}</td>", &fleet.prefill[0].url()[7..])),
        "the error is listed: {errors}"
    );
    let picture = &page[page.find("id=\"fleet\"").expect("a picture of the fleet")..];
    let picture = &picture[..picture.find("</svg>").expect("it ends")];
    assert_eq!(picture.matches("<rect").count(), 2, "each instance: {picture}");
    assert!(picture.contains("<path") && picture.contains("3 requests, 0 failed"), "{picture}");
    assert!(page.contains("id=\"silent\" role=\"status\" hidden"), "the router answers: {page}");
}

pub(crate) async fn says_that_requests_fail_in_a_browser() {
    let browser = browser().expect("it is only run with one");
    let setup = "[health]\nevery = \"60s\"\neject_after = 1000\n[retries]\nattempts = 1\n";
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup(setup).start().await;
    let fault = Fault::Status(500);
    fleet.decode[0].script(Script { leg: Some(Leg::Decode), times: u32::MAX, fault });
    for _ in 0..5 {
        let body = completion("for the page, it fails", 2);
        assert_eq!(Call::post(fleet.port(), COMPLETIONS, &body).send().await.status, 500);
    }
    let page = rendered(&browser, &format!("http://127.0.0.1:{}/", fleet.port()));
    assert_eq!(text(&page, "ready"), "is failing", "{page}");
    assert_eq!(text(&page, "missing"), "5 of the last minute's 5 requests failed", "{page}");
    assert!(page.contains("failing: 5 failures in a row"), "{page}");
    let errors = &page[page.find("id=\"errors\"").expect("a table of errors")..];
    let errors = &errors[..errors.find("</tbody>").expect("it ends")];
    assert_eq!(errors.matches("<tr>").count(), 1, "one error, five times: {errors}");
    assert!(errors.contains("<td class=\"number\">5</td>"), "{errors}");
    assert!(errors.contains("answered with status 500: "), "{errors}");
}

pub(crate) async fn shows_the_time_of_requests_as_text_in_a_browser() {
    let browser = browser().expect("it is only run with one");
    let key = "let me in";
    let mut fleet =
        Plan::of(1, 1, &Settings::default()).variable("ADMIN_API_KEY", key).start().await;
    let call = Call::post(fleet.port(), COMPLETIONS, &completion("for the page, timed", 2));
    assert_eq!(call.header("x-request-id", "<b>bold</b>").send().await.status, 200);
    fleet.wait_until_idle();
    let page = Call::get(fleet.port(), "/").send().await.text();
    let mut status = Call::get(fleet.port(), "/status").send().await.json();
    status["errors"] = serde_json::json!([{
        "instance": "<u>a:1</u>", "what": "<img src=x>", "count": 2, "first": 1.0, "last": 2.0,
    }]);
    let requests = Call::get(fleet.port(), "/requests").header("x-api-key", key).send().await;
    // As if a person had entered a key.
    let entered = page.replace("\nlook();\n", "\nadminKey = \"x\"; refresh();\nlook();\n");
    assert_ne!(entered, page);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let served = Served { page: entered.into_bytes(), requests: requests.text() };
    tokio::spawn(serve_looks(listener, served, vec![status.to_string()]));
    let page = rendered(&browser, &format!("http://{address}/"));
    let times = &page[page.find("id=\"waterfall\"").expect("a list of requests")..];
    let times = &times[..times.find("</main>").expect("it ends")];
    assert_eq!(times.matches("<details>").count(), 1, "{times}");
    assert!(times.contains("&lt;b&gt;bold&lt;/b&gt;") && !times.contains("<b>"), "{times}");
    for (part, instance) in [("prefill", &fleet.prefill[0]), ("decode", &fleet.decode[0])] {
        let words = format!("{part} at {}: began at ", &instance.url()[7..]);
        assert!(times.contains(&words), "{words}: {times}");
    }
    for kind in ["queue", "prefill", "wait under"] {
        assert!(times.contains(&format!("<i class=\"{kind}\"")), "{kind}: {times}");
    }
    assert!(page.contains("<td class=\"text\">&lt;img src=x&gt;</td>"), "{page}");
    assert!(!page.contains("<img") && !page.contains("<u>"), "{page}");
}

/// What a stand-in for a router answers.
struct Served {
    page: Vec<u8>,
    requests: String,
}

/// Serves this page, and one status after the other at `/status`; never returns.
async fn serve_looks(listener: TcpListener, served: Served, looks: Vec<String>) {
    let mut looks = looks.into_iter();
    let mut last = String::new();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = stream.read_u8().await else { break };
            head.push(byte);
        }
        let (kind, body) = if head.starts_with(b"GET /status ") {
            last = looks.next().unwrap_or(last);
            ("application/json", last.clone().into_bytes())
        } else if head.starts_with(b"GET /requests") {
            ("application/json", served.requests.clone().into_bytes())
        } else {
            ("text/html; charset=utf-8", served.page.clone())
        };
        let head = format!(
            "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.into_bytes(), body].concat()).await.ok(); // an error: the browser has gone
    }
}

pub(crate) async fn shows_rates_in_a_browser() {
    let browser = browser().expect("it is only run with one");
    let fleet = Fleet::new(1, 1).await;
    let page = Call::get(fleet.port(), "/").send().await.body.to_vec();
    let mut status = Call::get(fleet.port(), "/status").send().await.json();
    // Between two polls, about a second apart, 40 more requests end: 10 of them by the fleet's
    // fault.
    let looks = (0..100).map(|look| {
        let counts = [
            ("ok", 20),
            ("client_error", 4),
            ("client_gone", 6),
            ("upstream_error", 5),
            ("timeout", 5),
        ];
        for (outcome, count) in counts {
            status["requests"][outcome] = (1000 + look * count).into();
        }
        status.to_string()
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let served = Served { page, requests: String::new() };
    tokio::spawn(serve_looks(listener, served, looks.collect()));
    let page = rendered(&browser, &format!("http://{address}/"));
    let rate = |id: &str| {
        text(&page, id).parse::<f64>().unwrap_or_else(|_| panic!("{id} is no number: {page}"))
    };
    let (all, failed) = (rate("rate"), rate("failed_rate"));
    // A poll itself takes time.
    assert!((20.0..=40.5).contains(&all), "{all} a second; {page}");
    assert!(
        (failed * 4.0 - all).abs() <= 0.3,
        "a quarter of {all} has failed, not {failed}; {page}"
    );
}
