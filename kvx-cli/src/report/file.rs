//! The file of a report: it replaces an earlier one when it is complete.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::Result;

/// A temporary file in the folder of a report. Dropping it leaves an earlier report as it is.
pub(crate) struct ReportFile {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
}

impl ReportFile {
    /// Fails if the report could not be written, or would replace the command's input or no regular file.
    pub(crate) fn new(path: &Path, input: Option<&Path>) -> Result<Self> {
        let cannot = |why: &dyn std::fmt::Display| {
            format!("cannot write the report {}: {why}", path.display())
        };
        // The target of a link, which the report replaces instead of the link.
        let real = match path.canonicalize() {
            Ok(real) if !real.is_file() => {
                return Err(cannot(&"it is not a regular file; name another file").into());
            }
            Ok(real) => real,
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(cannot(&error).into()),
        };
        let input = input.and_then(|input| input.canonicalize().ok());
        if input.is_some_and(|input| input == real) {
            return Err(cannot(&"it is the file to replay; name another file").into());
        }
        let mut name = real.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let temporary = real.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary);
        let file = file.map_err(|error| cannot(&error))?;
        Ok(ReportFile { path: real, temporary, file })
    }

    /// Writes the report.
    pub(crate) fn write(mut self, page: &str) -> Result<()> {
        let written = self.file.write_all(page.as_bytes());
        written.and_then(|()| std::fs::rename(&self.temporary, &self.path)).map_err(|error| {
            format!("cannot write the report {}: {error}", self.path.display()).into()
        })
    }
}

impl Drop for ReportFile {
    fn drop(&mut self) {
        // It no longer exists if it has become the report.
        let _ = std::fs::remove_file(&self.temporary);
    }
}
