//! `kvx proxy` between clients and a fleet of instances, each a process.
//!
//! The instances are those of kvx-instance, which run in this program again. They stop where a vLLM
//! 0.33 would stop, and report it at the end of each test.

mod check;
mod choice;
pub(crate) mod client;
mod clients;
pub(crate) mod commands;
mod crowd;
mod discovery;
mod endpoints;
mod errors;
mod explain;
mod fallback;
pub(crate) mod faults;
pub(crate) mod fleet;
mod instances;
mod kubernetes;
mod load;
mod measurements;
mod page;
mod passing;
mod recipes;
mod replay;
mod requests;
mod security;
mod signals;
mod tls;

use std::time::Duration;

#[cfg(not(feature = "tls"))]
use kvx_testkit::Tier;
use kvx_testkit::{Failure, is_own_process, run_in_own_process};
use libtest_mimic::Trial;

/// The time after which a test counts as hung.
const LIMIT: Duration = Duration::from_secs(60);

/// Creates trials from the names of modules and their tests.
macro_rules! trials {
    ($($module:ident: $($test:ident),+;)+) => {
        vec![$($(trial(concat!(stringify!($module), "::", stringify!($test)), $module::$test)),+),+]
    };
}

fn trial<F: Future<Output = ()>>(name: &str, test: impl FnOnce() -> F + Send + 'static) -> Trial {
    kvx_testkit::trial(format!("proxy::{name}"), move || run(test))
}

pub(crate) fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) -> Result<(), Failure> {
    run_within(LIMIT, test)
}

/// Runs a test that may take this long.
pub(crate) fn run_within<F: Future<Output = ()>>(
    limit: Duration,
    test: impl FnOnce() -> F,
) -> Result<(), Failure> {
    // The test waits for its instances without yielding; connections proceed on the other thread.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let ended = runtime.block_on(async { tokio::time::timeout(limit, test()).await });
    ended.map_err(|_| Failure::new(format!("it has not ended within {limit:?}")))
}

/// The trial with many connections, in a process with a raised limit of descriptors.
fn crowd() -> Trial {
    let name = "proxy::crowd::a_thousand_idle_and_a_thousand_slow_connections_stay_under_128_mib";
    kvx_testkit::trial(name, move || match is_own_process() {
        true => {
            crowd::allow_descriptors();
            run(crowd::a_thousand_idle_and_a_thousand_slow_connections_stay_under_128_mib)
        }
        false => run_in_own_process(name, |_| {}),
    })
}

pub(crate) fn all_trials() -> Vec<Trial> {
    let mut trials = trials! {
        instances:
            give_the_answers_of_a_single_server, hand_over_their_blocks_once, stop_where_a_vllm_stops,
            notice_blocks_of_another_prompt, count_blocks_that_no_instance_reads,
            produce_the_requested_faults;
        recipes:
            pull_is_prefill_then_decode, push_is_both_legs_with_one_request_id,
            mooncake_is_both_legs_with_one_transfer_id, mooncake_ranks_take_turns,
            a_later_turn_loads_what_the_decode_instance_holds,
            the_client_gets_what_one_server_would_answer, hosts_that_a_client_names_are_dropped;
        endpoints:
            models_are_those_that_both_sides_serve,
            other_requests_go_to_a_decode_instance_unchanged, health_and_readiness_are_reported,
            metrics_count_requests_and_legs, the_wait_for_admission_is_measured,
            instances_are_added_and_removed_only_with_the_key;
        passing:
            status_and_content_type_of_the_instance_reach_the_client, a_stream_passes_as_it_arrives,
            an_error_after_the_first_byte_is_an_event_and_an_end,
            headers_of_the_client_are_forwarded_except_hop_by_hop_ones,
            a_client_that_goes_away_ends_both_legs, a_client_that_goes_away_ends_both_legs_that_run_at_once,
            connections_to_instances_are_pooled_over_both_protocols;
        choice:
            round_robin_takes_turns, least_tokens_go_where_least_is_outstanding,
            a_prefix_stays_with_its_instance, short_prompts_stay_on_the_decode_side, weights_count,
            ranks_take_turns, without_a_model_instances_of_one_model_are_paired,
            only_compatible_instances_are_paired;
        faults:
            a_failed_prefill_is_tried_on_another_instance,
            requests_that_would_stop_a_decode_instance_never_reach_it,
            a_decode_that_accepted_nothing_is_replaced_with_the_same_blocks,
            a_decode_that_failed_before_its_first_byte_gets_a_fresh_prefill,
            an_answer_that_is_not_streamed_has_the_timeout_of_its_request,
            client_errors_do_not_count_against_the_instance, a_decode_that_refuses_ends_its_concurrent_prefill,
            both_legs_at_once_fail_together_and_are_answered_by_others, retries_have_a_budget,
            an_instance_that_fails_is_ejected_and_tried_again,
            the_last_instance_of_a_pool_is_not_ejected_for_its_latency,
            an_instance_that_takes_no_connection_in_time_is_replaced_with_the_same_blocks,
            the_last_instance_that_takes_no_connection_in_time_is_late_and_stays,
            requests_beyond_the_queue_get_503_with_retry_after,
            unreachable_blocks_are_freed_when_their_lease_ends,
            requests_to_a_stopped_instance_only_time_out;
        commands:
            the_command_line_of_toy_proxy_server_works_unchanged,
            the_command_line_of_mooncake_connector_proxy_works_unchanged,
            check_explains_a_configuration_and_its_errors,
            compare_distinguishes_equal_endpoints_from_others, compare_exits_1_on_another_text_and_0_on_the_same,
            compare_uses_token_ids_where_both_endpoints_return_them,
            compare_counts_equal_errors_as_equal_and_says_so;
        errors: name_no_instance_but_the_log_and_the_status_do;
        explain: says_where_a_request_goes_and_why, needs_the_key;
        replay:
            a_recording_has_lengths_and_keyed_hashes_but_no_text, a_replay_sends_what_was_recorded,
            a_seed_makes_the_same_requests_and_a_trace_of_mooncake_plays,
            outcomes_of_failures_are_recorded, a_full_disk_ends_the_recording_and_no_request,
            a_restart_adds_to_the_recording_and_its_size_is_limited,
            malformed_files_are_refused_with_the_line;
        measurements:
            a_replay_compares_two_endpoints_and_writes_a_page,
            endpoints_that_take_turns_are_never_busy_at_the_same_time,
            waiting_for_others_is_a_part_of_the_times, unknown_counts_of_a_cache_discard_no_answers,
            a_report_replaces_an_earlier_one_only_when_it_is_complete;
        fallback:
            is_off_by_default_and_503_names_the_missing_side, lets_decodes_compute_prompts_and_says_so,
            has_a_cap;
        check: reports_recipes_and_warnings;
        discovery: follows_a_server_and_survives_its_death;
        kubernetes:
            pods_serve_drain_and_go_by_the_flags_of_sglangs_router,
            without_a_pod_it_says_what_to_set;
        signals:
            hangup_reloads_the_file, hangup_reloads_the_keys,
            termination_lets_streams_finish_and_takes_nothing_new, termination_ends_at_its_deadline;
        security:
            it_binds_loopback_by_default, clients_need_a_key_where_there_are_keys,
            requests_that_are_too_long_or_too_slow_are_rejected,
            invalid_http_is_answered_and_closed,
            an_instance_with_a_key_gets_the_clients;
        clients: the_openai_package_gets_its_answers, curl_gets_its_answers;
        page: reports_that_it_is_left_out_without_a_browser;
        requests:
            show_where_the_time_went_with_the_key_alone,
            repeated_errors_are_counted_and_quote_their_cause,
            a_thousand_and_the_slowest_hundred_are_kept;
        load: every_request_is_answered_while_instances_come_and_go;
    };
    trials.push(crowd());
    #[cfg(feature = "tls")]
    trials.extend(trials! {
        tls:
            curl_is_served_over_tls_only, compare_uses_tls_with_trusted_endpoints,
            check_reads_the_files_as_serving_does;
    });
    #[cfg(not(feature = "tls"))]
    {
        trials.extend(trials! { tls: a_build_without_tls_reports_it; });
        Tier::Whole.runs_or_says("clients over TLS");
    }
    if page::has_browser_or_says() {
        trials.extend(trials! {
            page:
                shows_instances_requests_and_errors_in_a_browser, shows_rates_in_a_browser,
                says_that_requests_fail_in_a_browser, shows_the_time_of_requests_as_text_in_a_browser;
        });
    }
    trials
}
