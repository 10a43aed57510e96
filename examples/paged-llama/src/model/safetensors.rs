//! Weights in mapped safetensors files: the system reads a page at its first use, and may evict it
//! again.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};
use serde_json::Value;

use super::config::{Dtype, read_json};
use super::error::{ModelError, Result};

/// The longest header that the format allows.
const LONGEST_HEADER: u64 = 100_000_000;

/// The tensors of a folder, by name.
pub(super) struct Tensors(HashMap<String, Tensor>);

/// The location of a tensor in its file.
#[derive(Clone)]
pub(super) struct Tensor {
    file: Arc<MappedFile>,
    bytes: Range<usize>,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
}

impl Tensors {
    /// Maps the files that `model.safetensors.index.json` names, or else `model.safetensors`.
    pub(super) fn open(folder: &Path) -> Result<Tensors> {
        let mut tensors = HashMap::new();
        for path in files(folder)? {
            let named = |error| ModelError::new(format!("{}: {error}", path.display()));
            let file = Arc::new(MappedFile::open(&path)?);
            read_header(&file, &mut tensors).map_err(|what| {
                named(format!(
                    "{what}: the file is damaged or incomplete; download or make it again"
                ))
            })?;
        }
        Ok(Tensors(tensors))
    }

    /// Takes the tensor with this name and shape.
    pub(super) fn take(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = self.0.get(name).ok_or_else(|| {
            ModelError::new(format!(
                "the weights have no {name}; they do not belong to this config.json"
            ))
        })?;
        match tensor.shape == shape {
            true => Ok(tensor.clone()),
            false => Err(ModelError::new(format!(
                "{name} has the shape {:?}, but config.json says {shape:?}: they are of different \
                 models",
                tensor.shape
            ))),
        }
    }
}

impl Tensor {
    /// Returns the numbers if they are `f32`.
    pub(super) fn f32s(&self) -> &[f32] {
        debug_assert_eq!(self.dtype, Dtype::F32);
        // SAFETY: every bit pattern is a valid `f32`.
        let (before, numbers, _) = unsafe { self.bytes().align_to::<f32>() };
        assert!(before.is_empty(), "`open` checks the alignment");
        numbers
    }

    /// Returns the numbers if they are `bf16`.
    pub(super) fn bf16s(&self) -> &[u16] {
        debug_assert_eq!(self.dtype, Dtype::Bf16);
        // SAFETY: every bit pattern is a valid `u16`.
        let (before, numbers, _) = unsafe { self.bytes().align_to::<u16>() };
        assert!(before.is_empty(), "`open` checks the alignment");
        numbers
    }

    /// Returns a copy as `f32`, for small tensors.
    pub(super) fn widened(&self) -> Vec<f32> {
        match self.dtype {
            Dtype::F32 => self.f32s().to_vec(),
            Dtype::Bf16 => {
                self.bf16s().iter().map(|&bits| f32::from_bits(u32::from(bits) << 16)).collect()
            }
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.file.bytes()[self.bytes.clone()]
    }
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join("model.safetensors.index.json");
    let Some(json) = read_json(&index)? else {
        return Ok(vec![folder.join("model.safetensors")]);
    };
    let names: BTreeSet<&str> = json["weight_map"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(_, name)| name.as_str())
        .collect();
    match names.iter().find(|name| name.contains('/')) {
        None if !names.is_empty() => Ok(names.into_iter().map(|name| folder.join(name)).collect()),
        _ => Err(ModelError::new(format!(
            "{}: weight_map names no files in this folder; download the model again",
            index.display()
        ))),
    }
}

/// Reads the header, JSON after its length: each tensor's type, shape and bytes, counted from the
/// header's end.
fn read_header(
    file: &Arc<MappedFile>,
    tensors: &mut HashMap<String, Tensor>,
) -> std::result::Result<(), String> {
    let bytes = file.bytes();
    let (length, rest) = bytes.split_first_chunk::<8>().ok_or("it is shorter than 8 bytes")?;
    let length = u64::from_le_bytes(*length);
    if length > LONGEST_HEADER || length > rest.len() as u64 {
        return Err(format!("it claims a header of {length} bytes"));
    }
    let begin = 8 + length as usize;
    let header: Value =
        serde_json::from_slice(&rest[..length as usize]).map_err(|error| error.to_string())?;
    for (name, entry) in header.as_object().ok_or("its header is not an object")? {
        if name == "__metadata__" {
            continue;
        }
        let wrong = || format!("{name} is described as {entry}");
        let numbers = |name: &str| -> Option<Vec<usize>> {
            let list = entry[name].as_array()?.iter();
            list.map(|number| usize::try_from(number.as_u64()?).ok()).collect()
        };
        let dtype = match entry["dtype"].as_str() {
            Some("F32") => Dtype::F32,
            Some("BF16") => Dtype::Bf16,
            _ => continue, // a tensor of another type counts as missing
        };
        let (shape, place) = numbers("shape").zip(numbers("data_offsets")).ok_or_else(wrong)?;
        let [from, to] = place[..] else { return Err(wrong()) };
        let size = shape.iter().try_fold(dtype.size(), |size, side| size.checked_mul(*side));
        if from > to || to > bytes.len() - begin || size != Some(to - from) {
            return Err(wrong());
        }
        if !(begin + from).is_multiple_of(dtype.size()) {
            return Err(format!("{name} is misaligned"));
        }
        let bytes = begin + from..begin + to;
        tensors.insert(name.clone(), Tensor { file: file.clone(), bytes, dtype, shape });
    }
    Ok(())
}

/// A file that is mapped into memory.
struct MappedFile {
    begin: *mut std::ffi::c_void,
    len: usize,
}

// SAFETY: the mapping is not tied to a thread; any thread may unmap it.
unsafe impl Send for MappedFile {}
// SAFETY: a shared reference only reads the bytes.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    fn open(path: &Path) -> Result<MappedFile> {
        let failed = |error: std::io::Error| {
            ModelError::new(format!(
                "{}: {error}; the folder needs the weights that its config.json describes",
                path.display()
            ))
        };
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len() as usize;
        if len == 0 {
            return Err(ModelError::new(format!(
                "{} is empty; download or make it again",
                path.display()
            )));
        }
        // SAFETY: the kernel chooses the place of the new mapping, so it replaces no other one.
        let begin = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::PRIVATE,
                &file,
                0,
            )
        };
        Ok(MappedFile { begin: begin.map_err(|error| failed(error.into()))?, len })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `open` mapped these bytes, and they stay mapped until this is dropped. Tools
        // write weights to new files, so no process changes them in place.
        unsafe { std::slice::from_raw_parts(self.begin.cast(), self.len) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: `open` mapped these bytes, and no slice outlives this.
        let _ = unsafe { rustix::mm::munmap(self.begin, self.len) };
    }
}
