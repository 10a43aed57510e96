//! Chat templates of Hugging Face.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value as Jinja};
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value};

use crate::model::{ModelError as Error, Result};

/// The fuel of a template for one prompt: an instruction usually costs one unit, and so do 64 bytes
/// of data. A long conversation takes a few hundred thousand units.
const MOST_WORK: u64 = 4 << 20;

/// A parsed template.
pub(super) struct Template {
    environment: Environment<'static>,
    /// `bos_token` and other tokens that templates name.
    tokens: Map<String, Value>,
}

impl Template {
    /// Reads the template of a model's folder, if it has one: a separate file, or a key of
    /// `tokenizer_config.json`.
    pub(super) fn open(folder: &Path, config: &Map<String, Value>) -> Result<Option<Self>> {
        let path = folder.join("chat_template.jinja");
        let source = match std::fs::read_to_string(&path) {
            Ok(source) => source,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                match config.get("chat_template") {
                    Some(Value::String(source)) => source.clone(),
                    // Several templates, by name.
                    Some(Value::Array(named)) => {
                        let default = named.iter().find(|named| named["name"] == "default");
                        match default.and_then(|named| named["template"].as_str()) {
                            Some(source) => source.to_owned(),
                            None => return Ok(None),
                        }
                    }
                    _ => return Ok(None),
                }
            }
            Err(error) => return Err(Error::new(format!("{}: {error}", path.display()))),
        };
        Self::new(source, config).map(Some)
    }

    pub(super) fn new(source: String, config: &Map<String, Value>) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(MOST_WORK));
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(Error::of)?);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |words: String| -> std::result::Result<(), minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, words))
            },
        );
        environment
            .add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
        environment.add_filter("tojson", tojson);
        environment
            .add_template_owned("chat", source)
            .map_err(|error| Error::new(format!("the chat template is not valid: {error}")))?;
        let mut tokens = Map::new();
        for (key, value) in config.iter().filter(|(key, _)| key.ends_with("_token")) {
            // A token is its text, or an object with the text.
            let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
            tokens.extend(text.map(|text| (key.clone(), text.into())));
        }
        Ok(Template { environment, tokens })
    }

    /// Renders the prompt of these messages; `more` has the template's other variables.
    pub(super) fn render(&self, messages: &Value, more: &Map<String, Value>) -> Result<String> {
        let mut context = self.tokens.clone();
        context.extend(more.clone());
        context.insert("messages".into(), messages.clone());
        let template = self.environment.get_template("chat");
        template.and_then(|template| template.render(Serde(context))).map_err(|error| {
            match error.kind() {
                ErrorKind::OutOfFuel => {
                    Error::new("the messages are too long for the chat template; send fewer")
                }
                _ => Error::new(format!("the chat template rejects these messages: {error:#}")),
            }
        })
    }
}

/// Writes JSON like Python: without escapes for HTML, and with a space after `,` and `:`.
fn tojson(value: Jinja, options: Kwargs) -> std::result::Result<String, minijinja::Error> {
    let failed = |error: serde_json::Error| {
        minijinja::Error::new(ErrorKind::BadSerialization, error.to_string())
    };
    let indent: Option<usize> = options.get("indent")?;
    options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let value = serde_json::to_value(&value).map_err(failed)?;
    match indent {
        Some(indent) => {
            let blanks = " ".repeat(indent.min(16));
            let pretty = serde_json::ser::PrettyFormatter::with_indent(blanks.as_bytes());
            serde::Serialize::serialize(
                &value,
                &mut serde_json::Serializer::with_formatter(&mut out, pretty),
            )
        }
        None => serde::Serialize::serialize(
            &value,
            &mut serde_json::Serializer::with_formatter(&mut out, Python),
        ),
    }
    .map_err(failed)?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

struct Python;

impl serde_json::ser::Formatter for Python {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
    ) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

/// Formats a date in UTC, with the directives that templates use.
fn strftime(format: &str, now: SystemTime) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] =
        ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (month_name, day_name) = (MONTHS[month - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        match letters.next() {
            Some('Y') => out += &year.to_string(),
            Some('y') => out += &format!("{:02}", year % 100),
            Some('m') => out += &format!("{month:02}"),
            Some('d') => out += &format!("{day:02}"),
            Some('B') => out += month_name,
            Some('b') => out += &month_name[..3],
            Some('A') => out += day_name,
            Some('a') => out += &day_name[..3],
            Some('H') => out += &format!("{:02}", of_day / 3600),
            Some('M') => out += &format!("{:02}", of_day / 60 % 60),
            Some('S') => out += &format!("{:02}", of_day % 60),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Returns the year, month and day of a number of days since 1970.
fn date(mut days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 0;
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    fn render(source: &str, messages: &Value, more: &Value) -> Result<String> {
        let config =
            json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "model_max_length": 5});
        let template = Template::new(source.to_owned(), config.as_object().unwrap())?;
        template.render(messages, more.as_object().unwrap())
    }

    #[test]
    fn an_ordinary_template_is_rendered() {
        let source = "{{ bos_token }}{% for message in messages %}\n    {%- if message['role'] == 'system' %}\n        \
                      {{- '[' + message.content.strip() + ']' }}\n    {%- else %}\n        \
                      {{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}\n    {%- endif %}\n\
                      {%- endfor %}\n{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}";
        let messages = json!([{"role": "system", "content": " be brief "}, {"role": "user", "content": "hello"}]);
        let text = render(source, &messages, &json!({"add_generation_prompt": true})).unwrap();
        assert_eq!(text, "<s>[be brief]<|user|>hello</s><|assistant|>");
    }

    #[test]
    fn a_template_may_raise_an_exception() {
        let source = "{% if messages[0].role != 'user' %}{{ raise_exception('users come first') }}{% endif %}";
        let error = render(source, &json!([{"role": "tool", "content": ""}]), &json!({}))
            .unwrap_err()
            .to_string();
        assert!(error.contains("users come first"), "{error}");
    }

    #[test]
    fn a_template_that_would_never_end_is_stopped() {
        let source =
            "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}";
        let few = json!(vec![json!({"content": "ab"}); 10]);
        assert_eq!(render(source, &few, &json!({})).unwrap().len(), 200);
        for (count, content) in [(5000, "ab".to_owned()), (300, "ab".repeat(10_000))] {
            let many = json!(vec![json!({"content": content}); count]);
            let error = render(source, &many, &json!({})).unwrap_err().to_string();
            assert!(error.contains("send fewer"), "{error}");
        }
    }

    #[test]
    fn json_and_python_methods_behave_as_in_python() {
        let messages = json!([{"role": "user", "content": "<a> & 'b'"}]);
        let text = render("{{ messages | tojson }}", &messages, &json!({})).unwrap();
        assert_eq!(text, r#"[{"content": "<a> & 'b'", "role": "user"}]"#);
        let text = render("{{ messages[0] | tojson(indent=2) }}", &messages, &json!({})).unwrap();
        assert_eq!(text, "{\n  \"content\": \"<a> & 'b'\",\n  \"role\": \"user\"\n}");
        let source = "{% set ns = namespace(n=0) %}{% for key, value in messages[0].items() %}{% set ns.n = ns.n + 1 %}\
                      {% endfor %}{{ ns.n }}{% if messages[0].content.startswith('<a>') %}y{% endif %}{{ messages[0].content.split(' ')[-1] }}";
        assert_eq!(render(source, &messages, &json!({})).unwrap(), "2y'b'");
    }

    #[test]
    fn dates_are_right() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(strftime("%d %b %Y", at(951_782_400)), "29 Feb 2000");
        assert_eq!(
            strftime("%A, %B %d, %Y %H:%M:%S %%", at(1_795_472_501)),
            "Monday, November 23, 2026 22:21:41 %"
        );
    }
}
