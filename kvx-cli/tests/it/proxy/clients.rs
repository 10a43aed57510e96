//! Tests with common clients: the `openai` package, and curl.

use std::path::{Path, PathBuf};
use std::process::Command;

use kvx_instance::{Fault, Leg, Script, answer_to};
use kvx_testkit::{output, skip};
use serde_json::json;

use crate::proxy::client::CUT_OFF;
use crate::proxy::fleet::Fleet;

/// Returns the Python with the `openai` package that `cargo xtask test --install` installs.
fn python() -> Option<PathBuf> {
    let environment = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers/openai/venv");
    let mut folders = std::fs::read_dir(environment.join("lib")).ok()?.flatten();
    folders.find(|python| python.path().join("site-packages/openai").is_dir())?;
    Some(environment.join("bin/python"))
}

fn said(command: &mut Command) -> String {
    let output = output(command, CUT_OFF * 3);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

const SCRIPT: &str = r#"
import json, sys
from openai import APIError, BadRequestError, OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0, timeout=10)
said = {"models": [model.id for model in client.models.list()]}
said["completion"] = client.completions.create(model="m", prompt="from Python", max_tokens=9).choices[0].text
stream = client.completions.create(model="m", prompt="from Python", max_tokens=9, stream=True)
said["streamed"] = "".join(chunk.choices[0].text for chunk in stream)
messages = [{"role": "user", "content": "from Python"}]
said["chat"] = client.chat.completions.create(model="m", messages=messages, max_tokens=9).choices[0].message.content
stream = client.chat.completions.create(model="m", messages=messages, max_completion_tokens=9, stream=True,
                                        stream_options={"include_usage": True})
chunks = list(stream)
said["chat_streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
said["usage"] = chunks[-1].usage.completion_tokens
said["several"] = len(client.completions.create(model="m", prompt="several", max_tokens=3, n=3).choices)
try:
    client.completions.create(model="m", prompt="x", max_tokens=2, extra_body={"min_tokens": 5})
except BadRequestError as error:
    said["refused"] = error.status_code
text = ""
try:
    for chunk in client.completions.create(model="m", prompt="breaks off", max_tokens=9, stream=True, extra_headers={"x-break": "1"}):
        text += chunk.choices[0].text
except APIError as error:
    said["broken_off"] = text
print(json.dumps(said))
"#;

pub(crate) async fn the_openai_package_gets_its_answers() {
    let Some(python) = python() else {
        skip(
            "proxy::clients::the_openai_package_gets_its_answers",
            "the openai package is not installed",
            "cargo xtask test --install",
        );
        return;
    };
    let mut fleet = Fleet::new(1, 1).await;
    // The last request with a transfer breaks off, after 4 successful decodes.
    fleet.decode[0].script(Script {
        leg: Some(Leg::Decode),
        times: 4,
        fault: Fault::SplitCharacter(1),
    });
    fleet.decode[0].script(Script {
        leg: Some(Leg::Decode),
        times: 1,
        fault: Fault::CloseAfter(3),
    });
    let url = format!("http://127.0.0.1:{}", fleet.port());
    let text = said(Command::new(python).args(["-c", SCRIPT, &url]));
    let said: serde_json::Value = serde_json::from_str(&text).expect("the script prints JSON");
    let plain = answer_to("from Python", 9);
    let chat = answer_to("user: \"from Python\"\n", 9);
    let expected = json!({
        "models": ["m"], "completion": plain, "streamed": plain, "chat": chat, "chat_streamed": chat, "usage": 9,
        "several": 3, "refused": 400, "broken_off": answer_to("breaks off", 3),
    });
    assert_eq!(said, expected);
}

pub(crate) async fn curl_gets_its_answers() {
    if !output(Command::new("sh").args(["-c", "command -v curl"]), CUT_OFF).status.success() {
        skip(
            "proxy::clients::curl_gets_its_answers",
            "curl is not installed",
            "apt-get install -y curl",
        );
        return;
    }
    let fleet = Fleet::new(1, 1).await;
    let url = format!("http://127.0.0.1:{}/v1/completions", fleet.port());
    for (version, stream) in
        [("--http1.1", false), ("--http1.1", true), ("--http1.0", false), ("--http1.0", true)]
    {
        let body = json!({"model": "m", "prompt": "from curl", "max_tokens": 6, "stream": stream})
            .to_string();
        let mut curl = Command::new("curl");
        curl.args([
            "-sS",
            "-N",
            "--fail",
            "--compressed",
            "--max-time",
            "10",
            version,
            "-H",
            "Content-Type: application/json",
        ]);
        let text = said(curl.args(["-d", &body, &url]));
        let whole = if stream {
            let events = text
                .lines()
                .filter_map(|line| line.strip_prefix("data: "))
                .filter(|data| *data != "[DONE]");
            assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
            let chunks = events.map(|event| {
                serde_json::from_str::<serde_json::Value>(event).expect("events are JSON")
            });
            chunks
                .map(|chunk| {
                    chunk["choices"][0]["text"].as_str().expect("chunks have text").to_owned()
                })
                .collect()
        } else {
            let body: serde_json::Value = serde_json::from_str(&text).expect("the answer is JSON");
            body["choices"][0]["text"].as_str().expect("a choice has text").to_owned()
        };
        assert_eq!(whole, answer_to("from curl", 6), "{version} {stream}");
    }
}
