//! The report of a replay: one HTML page that loads nothing.

use std::fmt::Write as _;

use kvx_proxy::replay::PlayedEndpoint;

use super::plot::{Axis, Plot, PlotKind, escaped};
use super::statistics::sorted;
use super::table::Row;

const STYLE: &str = "\
:root{color-scheme:light dark;--text:#1b1b1b;--page:#fff;--grid:#ddd;--s0:#0b62c4;--s1:#c2570c}\
@media(prefers-color-scheme:dark){:root{--text:#e6e6e6;--page:#15171a;--grid:#3a3d42;--s0:#6fb1ff;--s1:#ffab66}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);max-width:760px;margin:2em auto;padding:0 1em}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}\
td,th{padding:.15em .8em;border-bottom:1px solid var(--grid);text-align:right}\
td:first-child,th:first-child{text-align:left;white-space:pre}\
svg{width:100%;height:auto}svg text{fill:var(--text);font-size:12px}.grid{stroke:var(--grid)}\
polyline{fill:none;stroke-width:2}.s0{stroke:var(--s0)}.s1{stroke:var(--s1);stroke-dasharray:7 4}\
.p0{fill:var(--s0);fill-opacity:.7}.p1{fill:var(--s1);fill-opacity:.7}\
.k0{color:var(--s0)}.k1{color:var(--s1)}";

/// Returns the page about the replay, with the rows of the table.
pub(super) fn page(what: &str, rows: &[Row], played: &[PlayedEndpoint]) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>kvx replay</title><style>{STYLE}</style></head><body>\n<h1>kvx replay</h1>\n<p>{}</p>\n<table>\n",
        escaped(what)
    );
    for (number, (name, cells)) in rows.iter().enumerate() {
        let tag = if number == 0 { "th" } else { "td" };
        let _ = write!(page, "<tr><{tag}>{}</{tag}>", escaped(name));
        for (at, cell) in cells.iter().enumerate() {
            let class = if number == 0 { format!(" class=\"k{at}\"") } else { String::new() };
            let _ = write!(page, "<{tag}{class}>{}</{tag}>", escaped(cell));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n<p>");
    for (at, endpoint) in played.iter().enumerate() {
        let mark = ["solid line, dots", "dashed line, squares"][at.min(1)];
        let _ = write!(page, "<span class=\"k{at}\">{}</span>: {mark}. ", escaped(&endpoint.url));
    }
    page.push_str("</p>\n");
    for plot in plots(played) {
        let _ = writeln!(page, "<h2>{}</h2>\n{}", escaped(plot.title), plot.svg());
    }
    page.push_str("</body></html>\n");
    page
}

fn plots(played: &[PlayedEndpoint]) -> [Plot<'static>; 3] {
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
            Some((request.due.as_secs_f64(), request.first_token?.as_secs_f64() * 1e3))
        });
        answered.collect::<Vec<_>>()
    });
    let over_time: Vec<_> = over_time.collect();
    let last = over_time.iter().flatten().map(|(at, _)| *at).fold(0.0, f64::max);
    let part = || Axis::linear("percent of the answers", 100.0);
    let millis =
        |times: &[Vec<f64>]| Axis::logarithmic("milliseconds", times.iter().flatten().copied());
    [
        Plot {
            title: "Time until the first token, percent of the answers that were as fast",
            x: millis(&first),
            y: part(),
            kind: PlotKind::Line,
            series: first.iter().map(|times| distribution(times)).collect(),
        },
        Plot {
            title: "Time per token, percent of the answers that were as fast",
            x: millis(&token),
            y: part(),
            kind: PlotKind::Line,
            series: token.iter().map(|times| distribution(times)).collect(),
        },
        Plot {
            title: "Time until the first token, by the arrival of the request",
            x: Axis::linear("seconds since the replay began", last),
            y: millis(&first),
            kind: PlotKind::Points,
            series: over_time,
        },
    ]
}

/// Returns the percent of values that are not greater than each of them.
fn distribution(sorted: &[f64]) -> Vec<(f64, f64)> {
    let count = sorted.len() as f64;
    sorted.iter().enumerate().map(|(at, time)| (*time, 100.0 * (at + 1) as f64 / count)).collect()
}
