//! The findings of `kvx proxy --check` about a configuration and the instances that it checks.

use kvx_instance::{Connector, Instance, Settings};

use crate::proxy::commands::{kvx_proxy, said};
use crate::proxy::fleet::SetupFile;

pub(crate) async fn reports_recipes_and_warnings() {
    let of = |models: &[&str]| {
        let models = models.iter().map(|name| (*name).to_owned()).collect();
        Instance::start(Settings { models, ..Settings::default() })
    };
    let (prefill, decode, more, fewer) = (of(&["m"]), of(&["m"]), of(&["m", "p"]), of(&["m", "d"]));
    let locked =
        Instance::start(Settings { api_key: Some("theirs".to_owned()), ..Settings::default() });
    let settings = Settings { connector: Connector::Mooncake, dp_size: 2, ..Settings::default() };
    let mooncake = Instance::start(settings);
    let pool = |prefill: &Instance, decode: &Instance, more: [&str; 2]| {
        let entry =
            |instance: &Instance, more: &str| format!("[{{ url = \"{}\"{more} }}]", instance.url());
        let (prefill, decode) = (entry(prefill, more[0]), entry(decode, more[1]));
        format!("port = 0\n[[pool]]\nprefill = {prefill}\ndecode = {decode}\n")
    };
    let good = pool(&prefill, &decode, ["", ""]);
    let apart = [", compatibility = \"old\"", ", compatibility = \"new\""];
    let bootstrap = format!(", bootstrap_port = {}", mooncake.bootstrap_port());
    let recipe = |connector: &str| {
        good.replace("[[pool]]", &format!("[[pool]]\nconnector = \"{connector}\""))
    };
    let name = |instance: &Instance| instance.url()[7..].to_owned();
    let serves = |instance: &Instance| format!("prefill {} is up, serves m", name(instance));
    let only = |model: &str, side: &str| {
        let why = format!(
            "only {side} instances serve model {model}: its requests are not disaggregated"
        );
        format!("beware: pool default: {why}")
    };
    let instances = "pool default: 1 prefill and 1 decode instances";
    // The configuration, the exit status, and an expected line of the output.
    let cases = [
        (
            good.clone(),
            0,
            format!("{}, has no Mooncake bootstrap server: NixlConnector", serves(&prefill)),
        ),
        (
            pool(&mooncake, &decode, [&bootstrap, ""]),
            0,
            format!(
                "{}, has a Mooncake bootstrap server with 2 ranks: MooncakeConnector",
                serves(&mooncake)
            ),
        ),
        (
            good.clone(),
            0,
            format!("{instances}, the connector detected from its prefill instances"),
        ),
        (
            recipe("NixlPullConnector"),
            0,
            format!("{instances}, NixlPullConnector: prefill, then decode"),
        ),
        (recipe("NixlPullConnector"), 0, serves(&prefill)),
        (
            pool(&prefill, &locked, ["", ""]),
            0,
            format!(
                "beware: decode {} requires a key: set OPENAI_API_KEY; otherwise its models are unknown and \
                 clients must send their own key",
                name(&locked)
            ),
        ),
        (pool(&more, &fewer, ["", ""]), 0, only("p", "prefill")),
        (pool(&more, &fewer, ["", ""]), 0, only("d", "decode")),
        (
            format!("host = \"0.0.0.0\"\n{good}"),
            0,
            "beware: anyone who can reach this address can use it: no api_key_file is set"
                .to_owned(),
        ),
        (
            pool(&prefill, &decode, apart),
            1,
            format!(
                "fails: pool default: no decode instance is compatible with prefill {}",
                name(&prefill)
            ),
        ),
    ];
    for (text, status, line) in cases {
        let file = SetupFile::new(&text);
        let output = kvx_proxy(&["--config", file.path(), "--check"]);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(status), "{text}: {said}");
        assert!(said.lines().any(|one| one == line), "no line {line:?}: {text}: {said}");
        let beware = said.lines().any(|one| one.starts_with("beware: "));
        assert_eq!(
            beware,
            line.starts_with("beware: "),
            "only warnings are printed as warnings: {text}: {said}"
        );
    }
}
