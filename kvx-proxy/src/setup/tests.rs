use super::*;

#[test]
fn no_key_is_printed() {
    let key = Some(ApiKey::new("hush"));
    let secret = Some(FleetSecret::new([217; 32]));
    let setup = Setup {
        openai_api_key: key.clone(),
        admin_api_key: key,
        fleet_secret: secret,
        ..Setup::default()
    };
    let printed = format!("{setup:?}");
    assert!(printed.contains("ApiKey") && !printed.contains("hush"), "{printed}");
    assert!(printed.contains("FleetSecret") && !printed.contains("217"), "{printed}");
}

#[test]
fn the_readme_lists_the_defaults() {
    let readme = include_str!("../../README.md");
    let block = readme.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let mut read = Setup::from_toml(block).unwrap();
    assert_eq!(read.pools.len(), 1);
    assert_eq!(read.pools[0].prefill[0], InstanceSetup::new("http://10.0.0.1:8100/").unwrap());
    assert_eq!(read.pools[0].decode[0].weight, 2.0);
    read.pools.clear();
    assert_eq!(read, Setup::default());
}

#[test]
fn errors_name_what_is_wrong() {
    let cases = [
        ("prot = 8000", "prot"),
        ("connector = 'Nixl'", "NixlConnector"),
        ("drain = 5", "invalid type"),
        ("drain = '5 days'", "not a duration"),
        ("[limits]\nbody = '5MB'", "not a size"),
        ("[[pool]]\nprefill = ['10.0.0.1:8100']", "not a URL"),
        ("[[pool]]\nprefill = ['https://10.0.0.1:8100']", "a scheme other than http"),
        ("[[pool]]\nprefill = ['http://a:1/v1']", "has a path"),
        ("[[pool]]\nprefill = ['dns+https://a:1']", "a scheme other than http, dns+http"),
        ("[[pool]]\nprefill = ['dnssrv+http://_http._tcp.a:1']", "has a port"),
        ("[discovery]\nabsences = 0", "discovery.absences is 0"),
        ("[discovery]\nresolvers = ['10.0.0.1']", "resolvers"),
        ("[[pool]]\nprefill = ['http://u@a:1']", "has a user"),
        ("[discovery.kubernetes]\nselector = ['app']", "write key=value"),
        ("[discovery.kubernetes]\nprefill_selector = ['app in (a)']", "write key=value"),
        ("[discovery.kubernetes]\ndecode_selector = ['a=b', 'a=c']", "two values"),
        ("[discovery.kubernetes]\nport = 0", "port is 0"),
        ("[discovery.kubernetes]\nnamespace = 'a/b'", "name of a namespace"),
        ("[discovery.kubernetes]\npool = 'a'", "no pool has this name"),
        ("[discovery.kubernetes]\ncertificate = 'a'", "set both"),
        ("[discovery.kubernetes]\nca = 'a'", "set api too"),
        ("[discovery.kubernetes]\nevents = 'a:5'", "tcp://HOST:PORT"),
        ("[discovery.kubernetes]\nevents_replay = 'tcp://*:5'", "no events"),
        ("[[pool]]\nprefill = [{ url = 'http://a:1', weigth = 2 }]", "weigth"),
        ("[[pool]]\nprefill = [{ url = 'http://a:1', weight = 0 }]", "above 0"),
        ("[[pool]]\ndecode = [{ url = 'http://a:1', events = 'a:5' }]", "tcp://HOST:PORT"),
        ("[[pool]]\ndecode = [{ url = 'http://a:1', events_replay = 'tcp://*:5' }]", "no events"),
        (
            "[[pool]]\ndecode = [{ url = 'http://a:1', events = 'tcp://*:5', ranks = 2 }]",
            "each rank",
        ),
        ("[[pool]]\ndecode = ['http://a:1', 'http://a:1/']", "twice"),
        ("[[pool]]\n[[pool]]", "two pools"),
        ("[retries]\nattempts = 0", "retries.attempts is 0"),
        ("[limits]\nheaders = 100", "limits.headers"),
        ("tls_cert = 'c'", "both"),
    ];
    for (text, words) in cases {
        let error = Setup::from_toml(text).expect_err(text).to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
}

#[test]
fn pods_need_no_pool_in_the_file() {
    let setup = Setup::from_toml("[discovery.kubernetes]\nprefill_selector = ['a=b']").unwrap();
    assert_eq!(*setup.pools(), [Pool::default()]);
    let fleet = crate::fleet::Fleet::new(&setup, None);
    assert!(!fleet.is_ready());
    let found = setup.findings();
    let fails = |one: &&Finding| matches!(one, Finding::Fails(_));
    let fails: Vec<_> = found.iter().filter(fails).collect();
    let words = "pool default has no decode instance: no request can be answered";
    assert_eq!(fails, [&Finding::Fails(words.to_owned())], "only prefills may be found");
    let text = "[discovery.kubernetes]\nnamespace = 'llm'\nselector = ['x=y']\n\
                prefill_selector = ['a=b']\ndecode_selector = ['a=c']";
    let found = Setup::from_toml(text).unwrap().findings();
    assert!(found.iter().all(|one| matches!(one, Finding::Means(_))), "{found:?}");
    for (labels, role) in [("x=y,a=b", "prefill"), ("x=y,a=c", "decode")] {
        let words = format!(
            "pool default: ready pods of namespace llm with {labels} are {role} instances, at port \
             8000 unless an annotation names others"
        );
        assert!(found.contains(&Finding::Means(words)), "{found:?}");
    }
}
