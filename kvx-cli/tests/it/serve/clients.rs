//! Tests with common clients.

use std::path::{Path, PathBuf};
use std::process::Command;

use kvx_testkit::{output, skip, test};
use serde_json::json;

use crate::serve::server::{LIMIT, Server, ServerArgs, model};

/// Returns the Python with the `openai` package that `cargo xtask test --install` installs.
fn python() -> Option<PathBuf> {
    let environment = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers/openai/venv");
    let mut folders = std::fs::read_dir(environment.join("lib")).ok()?.flatten();
    folders.find(|python| python.path().join("site-packages/openai").is_dir())?;
    Some(environment.join("bin/python"))
}

const SCRIPT: &str = r#"
import json, sys
from openai import BadRequestError, NotFoundError, OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0, timeout=20)
said = {"models": [model.id for model in client.models.list()]}
ask = dict(model="m", prompt="from Python", max_tokens=9, temperature=0, extra_body={"ignore_eos": True})
whole = client.completions.create(**ask)
said["tokens"] = whole.usage.completion_tokens
streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True))
said["streamed"] = streamed == whole.choices[0].text
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "from Python"}]
ask = dict(model="m", messages=messages, max_completion_tokens=9, temperature=0, extra_body={"ignore_eos": True})
chat = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
said["role"] = chat.choices[0].message.role
said["logprobs"] = len(chat.choices[0].logprobs.content)
chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
said["chat_streamed"] = text == chat.choices[0].message.content
said["usage"] = chunks[-1].usage.completion_tokens
said["several"] = len(client.completions.create(model="m", prompt="several", max_tokens=3, n=3).choices)
for name, error, ask in [("bad", BadRequestError, dict(model="m", prompt="x", top_p=7)),
                         ("unknown", NotFoundError, dict(model="x", prompt="x"))]:
    try:
        client.completions.create(**ask)
    except error as refused:
        said[name] = refused.status_code
print(json.dumps(said))
"#;

#[test]
fn the_openai_package_gets_its_answers() {
    let Some(python) = python() else {
        skip(
            "serve::clients::the_openai_package_gets_its_answers",
            "the openai package is not installed",
            "cargo xtask test --install",
        );
        return;
    };
    let server = Server::start(&model(&["--arch", "qwen2"]), ServerArgs::default());
    let mut command = Command::new(python);
    let output =
        output(command.args(["-c", SCRIPT, &format!("http://127.0.0.1:{}", server.port)]), LIMIT);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let said: serde_json::Value = serde_json::from_str(&text).expect("the script prints JSON");
    let expected = json!({
        "models": ["m"], "tokens": 9, "streamed": true, "role": "assistant", "logprobs": 9, "chat_streamed": true,
        "usage": 9, "several": 3, "bad": 400, "unknown": 404,
    });
    assert_eq!(said, expected);
}
