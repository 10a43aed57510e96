//! Tests of the names in errors. The client of these tests fails at every error of a router that
//! names an instance, so all other tests of faults check it too.

use kvx_instance::{Connector, Fault, Leg, Script, Settings, WrongAnswer};

use crate::proxy::client::{Call, completion, streamed};
use crate::proxy::fleet::Plan;
use crate::proxy::recipes::COMPLETIONS;

const SETUP: &str = "[timeouts]\nfirst_byte = \"2s\"\nprefill = \"2s\"\nidle = \"2s\"\n\
                     [health]\nevery = \"60s\"\ndown_after = 1000\neject_after = 1000\n\
                     [retries]\nattempts = 1\n";

fn always(leg: Leg, fault: Fault) -> Script {
    Script { leg: Some(leg), times: u32::MAX, fault }
}

/// Checks what clients and the log see of an instance that fails.
pub(crate) async fn name_no_instance_but_the_log_and_the_status_do() {
    for (connector, pool) in [
        (Connector::Pull, ""),
        (Connector::Push, "connector = \"NixlPushConnector\""),
        (Connector::Mooncake, "connector = \"MooncakeConnector\""),
    ] {
        let settings = Settings { connector, ..Settings::default() };
        let mut fleet = Plan::of(1, 1, &settings).setup(SETUP).pool(pool).start().await;
        let ask = async |port, id: &str| {
            let answer = Call::post(port, COMPLETIONS, &completion("failed, failed", 4));
            answer.header("x-request-id", id).send().await
        };
        assert_eq!(ask(fleet.port(), "first").await.status, 200, "the router knows the engine");
        let faults = [
            (Leg::Prefill, Fault::Status(404), 404),
            (Leg::Prefill, Fault::Status(500), 500),
            (Leg::Prefill, Fault::CloseFirst, 502),
            (Leg::Prefill, Fault::HangFirst, 504),
            (Leg::Prefill, Fault::Wrong(WrongAnswer::ErrorWith200), 502),
            (Leg::Decode, Fault::Status(404), 404),
            (Leg::Decode, Fault::Status(500), 500),
            (Leg::Decode, Fault::Status(501), 501),
            (Leg::Decode, Fault::Status(503), 503),
            (Leg::Decode, Fault::CloseFirst, 502),
        ];
        for (count, (leg, fault, status)) in faults.into_iter().enumerate() {
            let id = format!("fault-{count}");
            let told = format!("{connector:?} {leg:?} {fault:?}");
            let instances =
                if leg == Leg::Prefill { &mut fleet.prefill } else { &mut fleet.decode };
            instances[0].script(always(leg, fault.clone()));
            let named = instances[0].url()[7..].to_owned();
            let answer = ask(fleet.port(), &id).await;
            fleet.prefill[0].clear_scripts();
            fleet.decode[0].clear_scripts();
            // With both legs at once, the other one may end first.
            assert!(answer.status == status || connector != Connector::Pull, "{told}: {answer:?}");
            if answer.status == status {
                let told = format!("{told}: {}", answer.text());
                let line = fleet.proxy.log_line(&format!("\"{id}\"")).await;
                assert!(line.contains(&named), "{told}: {line}");
                let scripted = matches!(fault, Fault::Status(_));
                assert_eq!(line.contains("engine-"), scripted, "{told}: {line}");
            }
        }
        let status = Call::get(fleet.port(), "/status").send().await.json();
        let errors = status["errors"].to_string();
        assert!(
            errors.contains("engine-") && errors.contains(&fleet.decode[0].url()[7..]),
            "{errors}"
        );
        for fault in [Fault::ErrorAfter(2), Fault::CloseAfter(2), Fault::HangAfter(2)] {
            fleet.decode[0].script(Script { leg: Some(Leg::Decode), times: 1, fault });
            let stream = Call::post(fleet.port(), COMPLETIONS, &streamed("a failed stream", 4));
            let stream = stream.stream().await;
            assert!(stream.error.is_some(), "{stream:?}");
        }
        fleet.wait_until_idle();
        for role in ["prefill", "decode"] {
            let instances = if role == "prefill" { &mut fleet.prefill } else { &mut fleet.decode };
            instances[0].listen(false);
            let answer = ask(fleet.port(), role).await;
            assert_eq!(answer.status, 502, "{role}: {answer:?}");
            let message = answer.json()["error"]["message"].to_string();
            let what = format!("the {role} instance in pool default could not be reached");
            assert!(message.contains(&what) || connector != Connector::Pull, "{message}");
            let instances = if role == "prefill" { &mut fleet.prefill } else { &mut fleet.decode };
            instances[0].listen(true);
        }
    }
}
