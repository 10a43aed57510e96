//! The page `/` in a browser. Only where the variable `KVX_BROWSER` names one, Debian's `chromium` for example: it is
//! too large to install for every run.

use std::ffi::OsString;
use std::process::Command;

use kvx_instance::{Fault, Leg, Script, Settings};
use kvx_testkit::output;

use crate::client::{CUT_OFF, Call, completion};
use crate::fleet::Plan;
use crate::recipes::COMPLETIONS;

/// The browser to use, if there is one.
pub(crate) fn browser() -> Option<OsString> {
    std::env::var_os("KVX_BROWSER").filter(|browser| !browser.is_empty())
}

/// The page's document after its script has run for some seconds of its own time.
fn rendered(browser: &OsString, url: &str) -> String {
    let profile = std::env::temp_dir().join(format!("kvx-browser-{}", std::process::id()));
    let output = output(
        Command::new(browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .args(["--virtual-time-budget=4000", "--dump-dom", url]),
        CUT_OFF * 5,
    );
    std::fs::remove_dir_all(profile).ok(); // an error: the browser has made none
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The text of the first element with this id.
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
            Call::post(fleet.port(), COMPLETIONS, &completion("for the page, for the page", 2)).send().await;
        assert_eq!(answer.status, 200);
    }
    fleet.prefill[0].script(Script { leg: Some(Leg::Prefill), times: 1, fault: Fault::CloseFirst });
    let failed =
        Call::post(fleet.port(), COMPLETIONS, &completion("for the page, for the page", 2)).send().await;
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
        "the error is told: {errors}"
    );
    assert!(page.contains("id=\"silent\" role=\"status\" hidden"), "the router answers: {page}");
}
