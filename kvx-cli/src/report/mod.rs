//! Reports as one file: pages and pictures that load nothing.

mod file;
mod plot;

use std::fmt::Write as _;

pub(crate) use self::file::ReportFile;
pub(crate) use self::plot::{Axis, Drawn, Key, Mark, Panel, Plot, escaped, standalone};

/// The style of pages, in addition to that of plots. Paper is always light.
const STYLE: &str = "\
:root{color-scheme:light dark}\
body{font:15px/1.5 system-ui,sans-serif;color:#1b1b1b;background:#fff;max-width:960px;margin:2em auto;padding:0 1em}\
h1{margin-bottom:0}h2{margin:1.6em 0 .2em}\
figure{margin:1em 0 1.6em}figcaption{margin-bottom:.3em}\
svg.plot{width:100%;height:auto}\
.wide{overflow-x:auto}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}\
caption{text-align:left;padding:.3em 0;color:#5c5c5c}\
td,th{padding:.15em .5em;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}\
td.text,th.text{text-align:left;white-space:pre}\
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1em 1.2em}dt{color:#5c5c5c}dd{margin:0}\
code{font:13px/1.5 ui-monospace,monospace;overflow-wrap:anywhere}\
@media screen and (prefers-color-scheme:dark){body{color:#e6e6e6;background:#15171a}\
td,th{border-color:#3a3d42}dt,caption{color:#a4a7ab}}\
@media print{:root{color-scheme:light}body{max-width:none;margin:0;font-size:11px}table{font-size:8px}\
td,th{padding:.1em .5em}figure,tr,dl{break-inside:avoid}h2{break-after:avoid}thead{display:table-header-group}}";

/// Returns a page of these parts, which are HTML.
pub(crate) fn page(title: &str, parts: &[String]) -> String {
    let (plots, title) = (plot::STYLE, escaped(title));
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>{title}</title><style>{STYLE}{plots}</style></head><body>\n<h1>{title}</h1>\n"
    );
    for part in parts {
        page.push_str(part);
        page.push('\n');
    }
    page.push_str("</body></html>\n");
    page
}

/// Returns a table of HTML. The first row is the heading; the first `texts` columns are texts, and
/// the others numbers.
pub(crate) fn table<'a>(
    caption: &str,
    texts: usize,
    rows: impl IntoIterator<Item = impl IntoIterator<Item = &'a str>>,
) -> String {
    let mut table = String::from("<div class=\"wide\"><table>");
    if !caption.is_empty() {
        let _ = write!(table, "<caption>{}</caption>", escaped(caption));
    }
    for (number, row) in rows.into_iter().enumerate() {
        table.push_str(["\n<thead><tr>", "</thead>\n<tbody><tr>", "\n<tr>"][number.min(2)]);
        for (at, cell) in row.into_iter().enumerate() {
            let class = if at < texts { " class=\"text\"" } else { "" };
            let (tag, scope) = match (number, at) {
                (0, _) => ("th", " scope=\"col\""),
                (_, 0) => ("th", " scope=\"row\""),
                _ => ("td", ""),
            };
            let _ = write!(table, "<{tag}{scope}{class}>{}</{tag}>", escaped(cell));
        }
        table.push_str("</tr>");
    }
    table.push_str("</tbody></table></div>");
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_load_nothing_and_show_texts_as_they_are() {
        let rows = [["a<b", "GB/s"], ["SHM & TCP", "1.5"], ["x", "2"]];
        let page = page("<kvx>", &[table("all \"rows\"", 1, rows)]);
        assert!(page.contains("<title>&lt;kvx&gt;</title>"), "{page}");
        assert!(page.contains("<caption>all &quot;rows&quot;</caption>"), "{page}");
        assert!(page.contains("<thead><tr><th scope=\"col\" class=\"text\">a&lt;b</th>"), "{page}");
        let row = "<tr><th scope=\"row\" class=\"text\">SHM &amp; TCP</th><td>1.5</td></tr>";
        assert!(page.contains(row), "{page}");
        for loaded in ["src=", "href=", "url(", "@import", "http:"] {
            assert!(!page.contains(loaded), "{loaded}");
        }
    }
}
