//! The report of a replay: one HTML page that loads nothing.

use kvx_proxy::replay::PlayedEndpoint;

use super::statistics::sorted;
use super::table::Row;
use crate::report::{self, Axis, Drawn, Key, Mark, Panel, Plot, escaped};

/// Returns the page about the replay, with the rows of the table.
pub(super) fn page(what: &str, rows: &[Row], played: &[PlayedEndpoint]) -> String {
    let cells = rows.iter().map(|(name, cells)| {
        std::iter::once(name.as_str()).chain(cells.iter().map(String::as_str))
    });
    let mut parts = vec![format!("<p>{}</p>", escaped(what)), report::table("", 1, cells)];
    parts.extend(
        plots(played).iter().map(|plot| {
            format!("<figure><h2>{}</h2>\n{}</figure>", escaped(&plot.title), plot.svg())
        }),
    );
    report::page("kvx replay", &parts)
}

fn plots(played: &[PlayedEndpoint]) -> [Plot; 3] {
    let first: Vec<Vec<f64>> = played
        .iter()
        .map(|one| sorted(one.requests.iter().filter_map(|request| request.first_token)))
        .collect();
    let token: Vec<Vec<f64>> = played
        .iter()
        .map(|one| sorted(one.requests.iter().filter_map(|request| request.per_token)))
        .collect();
    let over_time = played.iter().map(|one| {
        let answered = one.requests.iter().filter_map(|request| {
            let first = request.first_token?.as_secs_f64() * 1e3;
            Some(Mark::exact((request.due.as_secs_f64(), first)))
        });
        answered.collect::<Vec<_>>()
    });
    let over_time: Vec<_> = over_time.collect();
    let last = over_time.iter().flatten().map(|mark| mark.x).fold(0.0, f64::max);
    let part = || Axis::linear("percent of the answers", 100.0);
    let millis =
        |times: &[Vec<f64>]| Axis::logarithmic("milliseconds", times.iter().flatten().copied());
    let plot = |title: &str, x, y, drawn, series| Plot {
        title: title.to_owned(),
        description: "The table has the percentiles of these times.".to_owned(),
        x,
        y,
        series: played
            .iter()
            .enumerate()
            .map(|(colour, one)| Key { name: one.url.clone(), colour, drawn })
            .collect(),
        panels: vec![Panel { name: String::new(), series }],
    };
    let all = |times: &[Vec<f64>]| times.iter().map(|times| distribution(times)).collect();
    [
        plot(
            "Time until the first token, percent of the answers that were as fast",
            millis(&first),
            part(),
            Drawn::Curve,
            all(&first),
        ),
        plot(
            "Time per token, percent of the answers that were as fast",
            millis(&token),
            part(),
            Drawn::Curve,
            all(&token),
        ),
        plot(
            "Time until the first token, by the arrival of the request",
            Axis::linear("seconds since the replay began", last),
            millis(&first),
            Drawn::Points,
            over_time,
        ),
    ]
}

/// Returns the percent of values that are not greater than each of them.
fn distribution(sorted: &[f64]) -> Vec<Mark> {
    let count = sorted.len() as f64;
    let part = |(at, time): (usize, &f64)| (*time, 100.0 * (at + 1) as f64 / count);
    sorted.iter().enumerate().map(part).map(Mark::exact).collect()
}
