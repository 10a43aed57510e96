//! Bars are limits for the figures of a run: at least or at most a number. `bars.toml` and
//! `gpu.toml` define them.

use serde::Deserialize;
use serde_json::Value;

use crate::Result;

/// A figure of a run, and its bound. `bars.toml` describes the fields.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Bar {
    pub(crate) what: String,
    #[serde(default)]
    at: String,
    field: Option<String>,
    by: Option<String>,
    by_at: Option<String>,
    #[serde(default)]
    largest: Vec<String>,
    formula: Option<Formula>,
    at_least: Option<f64>,
    at_most: Option<f64>,
}

/// How a figure is calculated from fields with fixed names.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Formula {
    /// Nanoseconds that a block takes beyond its share of the limit.
    BeyondTheCopy,
    /// The factor by which small reads take longer during bulk reads than alone or, if that is
    /// less, their 99th percentile in fifths of that of bare connections.
    BesideBulkOrBare,
}

impl Bar {
    /// Returns the bar's figure from the lines of its run; `field` is the run's default field.
    pub(crate) fn figure(&self, lines: &[Value], field: &str) -> Result<f64> {
        let figure = || {
            let number = |field: &str| number(lines, &self.at, field);
            match self.formula {
                Some(Formula::BeyondTheCopy) => {
                    // 1e9 bytes a second are one byte a nanosecond.
                    let copy = number("block")? / number("limit_gbps")?;
                    Some(copy * (1.0 / number("ratio")? - 1.0))
                }
                Some(Formula::BesideBulkOrBare) => {
                    let of_bare = number("small.beside_p99_us")? / number("bare.beside_p99_us")?;
                    Some(number("small.times")?.min(5.0 * of_bare))
                }
                None if !self.largest.is_empty() => {
                    let all = self
                        .largest
                        .iter()
                        .map(|field| number(field))
                        .collect::<Option<Vec<_>>>()?;
                    all.into_iter().reduce(f64::max)
                }
                None => {
                    let figure = number(self.field.as_deref().unwrap_or(field))?;
                    let Some(by) = &self.by else { return Some(figure) };
                    let at = self.by_at.as_ref().unwrap_or(&self.at);
                    Some(figure / self::number(lines, at, by)?)
                }
            }
        };
        Ok(figure().ok_or_else(|| format!("the run does not print: {}", self.what))?)
    }

    /// Returns a line of the table, and whether the median of the figures meets the bar.
    pub(crate) fn row(&self, mut figures: Vec<f64>) -> (String, bool) {
        figures.sort_unstable_by(f64::total_cmp);
        let (median, last) = (figures[figures.len() / 2], figures[figures.len() - 1]);
        let held = self.at_least.is_none_or(|least| median >= least)
            && self.at_most.is_none_or(|most| median <= most);
        let met = if held { "met" } else { "MISSED" };
        let (asked, verdict) = match (self.at_least, self.at_most) {
            (Some(least), _) => (format!("at least {}", show(least)), met),
            (_, Some(most)) => (format!("at most {}", show(most)), met),
            (None, None) => ("-".to_owned(), ""),
        };
        let [median, first, last] = [median, figures[0], last].map(show);
        (format!("| {} | {asked} | {median} | {first} | {last} | {verdict} |", self.what), held)
    }
}

/// Returns a field of the one line that has the values in `at`; a dot leads into an object.
fn number(lines: &[Value], at: &str, field: &str) -> Option<f64> {
    let fits = |line: &&Value| {
        at.split_whitespace().all(|word| {
            let (field, value) = word.split_once('=').unwrap_or((word, ""));
            let found = &line[field];
            found.as_str().map_or_else(|| found.to_string(), str::to_owned) == value
        })
    };
    let mut fitting = lines.iter().filter(fits);
    let line = fitting.next().filter(|_| fitting.next().is_none())?;
    field.split('.').try_fold(line, |value, key| value.get(key))?.as_f64()
}

/// Returns the JSON objects among the lines of an output.
pub(crate) fn lines(output: &str) -> Result<Vec<Value>> {
    let lines = output.lines().filter(|line| line.starts_with('{'));
    Ok(lines.map(serde_json::from_str).collect::<std::result::Result<_, _>>()?)
}

/// Prints a table, unless it has no rows.
pub(crate) fn print_table(head: &str, rows: &[String]) {
    print!("{}", table(head, rows));
}

/// Returns a table below an empty line, or nothing if it has no rows.
pub(crate) fn table(head: &str, rows: &[String]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let rule = "---|".repeat(head.split('|').count());
    format!("\n| {head} |\n|{rule}\n{}\n", rows.join("\n"))
}

/// Formats a figure with three digits or more.
pub(crate) fn show(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 || value.fract() == 0.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = r#"text before
{"op":"read","count":1,"ratio":0.5,"limit_gbps":8.0,"block":16384,"deep":{"down":7}}
{"op":"write","count":1,"ratio":0.9,"limit_p50_us":2}
"#;

    fn figure(bar: &str) -> Option<f64> {
        let bar: Bar = toml::from_str(&format!("what = \"x\"\n{bar}")).unwrap();
        bar.figure(&lines(OUTPUT).unwrap(), "ratio").ok()
    }

    #[test]
    fn figures_come_from_the_one_line_that_fits() {
        assert_eq!(figure("at = 'op=read'"), Some(0.5));
        assert_eq!(figure("at = 'op=read count=1'\nfield = 'deep.down'"), Some(7.0));
        for unclear in ["at = 'count=1'", "at = 'op=none'", "at = 'op=read'\nfield = 'none'"] {
            assert_eq!(figure(unclear), None, "{unclear}");
        }
        assert_eq!(figure("at = 'op=write'\nby = 'limit_p50_us'"), Some(0.45));
        assert_eq!(figure("at = 'op=read'\nby = 'limit_p50_us'\nby-at = 'op=write'"), Some(0.25));
        assert_eq!(figure("at = 'op=read'\nlargest = ['ratio', 'limit_gbps']"), Some(8.0));
        // 16 KiB at 8 bytes a nanosecond, at half of the limit's speed: as much again.
        assert_eq!(figure("at = 'op=read'\nformula = 'beyond-the-copy'"), Some(2048.0));
    }

    #[test]
    fn a_bar_is_missed_by_its_median() {
        let at_least = Bar { what: "something".to_owned(), at_least: Some(0.9), ..Bar::default() };
        let (line, held) = at_least.row(vec![0.5, 0.95, 0.91, 0.2, 0.99]);
        assert!(
            held && line == "| something | at least 0.90 | 0.91 | 0.20 | 0.99 | met |",
            "{line}"
        );
        assert!(!at_least.row(vec![0.5, 0.95, 0.2]).1);
        let at_most = Bar { at_most: Some(200.0), ..Bar::default() };
        assert!(at_most.row(vec![200.0]).1 && !at_most.row(vec![200.1]).1);
    }
}
