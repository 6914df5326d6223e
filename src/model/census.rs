//! What a header-only look at the files found, and how to say what is missing.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::config::Config;
use super::weights::{self, Class};
use crate::kernels::Format;
use crate::store::Shards;

/// One tensor as found, for the census and for conversion, or as a complete model has it ([`weights::tensors`]).
#[derive(Clone, Debug)]
pub struct Found {
    /// Checkpoint name.
    pub name: String,
    /// What it is for.
    pub class: Class,
    /// Layer, or `None` for embedding, head and final norm.
    pub layer: Option<usize>,
    /// Outputs; a vector has one row.
    pub rows: usize,
    /// Inputs, or the length of a vector.
    pub cols: usize,
    /// Stored format.
    pub format: Format,
    /// Stored bytes, scales included.
    pub bytes: usize,
}

/// What a header-only look at the files found.
pub struct Census {
    /// All tensors of the model that are there.
    pub found: Vec<Found>,
    /// Names of those that are not.
    pub missing: Vec<String>,
    /// Tensors in the files that the model does not use.
    pub unused: Vec<String>,
    /// Whether the MTP layer is complete; config may promise one that the files lack.
    pub mtp: bool,
}

impl Census {
    /// What runs, but not as well as it could, or not what the files were made for.
    pub fn warnings(&self, config: &Config) -> Vec<String> {
        let mut warnings = Vec::new();
        if config.mtp && !self.mtp {
            warnings.push(
                "config.json promises an MTP layer, the files have none: no drafts".to_owned(),
            );
        }
        let per_row = Format::Int4 { group: 0 };
        let eh = self.found.iter().find(|f| f.class == Class::MtpProjection && f.format == per_row);
        if let Some(f) = eh {
            warnings.push(format!(
                "{}: int4 with one scale per row rounds its embedding half to zero, drafts will hardly be accepted; \
                 take an int8 or grouped MTP file",
                f.name
            ));
        }
        let of_mtp = |n: &String| weights::layer_of(n) == Some(config.n_layers);
        if !config.mtp && self.unused.iter().any(of_mtp) {
            warnings.push(format!(
                "the files hold an MTP layer ({}) that config.json does not promise (`num_nextn_predict_layers`): not used",
                config.n_layers
            ));
        }
        if self.mtp
            && config.indexer.is_some()
            && !self
                .found
                .iter()
                .any(|f| f.layer == Some(config.n_layers) && weights::is_indexer(&f.name))
        {
            warnings.push(
                "the MTP layer has no indexer: drafts are made with dense attention".to_owned(),
            );
        }
        if config.indexer.is_none() && self.unused.iter().any(|n| weights::is_indexer(n)) {
            warnings.push("the files hold an indexer that config.json does not promise (`index_topk`): attention is dense".to_owned());
        }
        let beyond = |n: &&String| weights::layer_of(n).is_some_and(|i| i > config.n_layers);
        let beyond = self.unused.iter().filter(beyond).count();
        if beyond > 0 {
            warnings.push(format!(
                "{beyond} tensors belong to layers beyond the {} of config.json and are not used; is it the right config?",
                config.n_layers
            ));
        }
        warnings
    }

    /// One message for all missing tensors: how many, which layers, which files.
    ///
    /// # Panics
    /// When nothing is missing.
    pub fn explain_missing(&self, config: &Config, shards: &Shards, dir: Option<&Path>) -> String {
        let total = self.found.len() + self.missing.len();
        let mut text = format!(
            "missing {} of {total} tensors, the first is {}",
            self.missing.len(),
            self.missing[0]
        );
        let absent = absent_layers(config, self);
        if !absent.is_empty() {
            text += &format!(
                "; layers {} have no tensor at all (config.json says {} layers)",
                ranges(&absent),
                config.n_layers
            );
        }
        if self.missing.iter().all(|n| weights::is_indexer(n)) {
            text += "; config.json promises a sparse attention indexer that the files lack: add the out-idx files, or pass \
                     --no-indexer, which is exact up to ";
            text += &format!(
                "{} tokens and ends the context there",
                config.indexer.as_ref().map_or(0, |x| x.top_k)
            );
        }
        if self.missing.iter().all(|n| weights::layer_of(n) == Some(config.n_layers)) {
            text +=
                &format!("; the MTP layer ({}) must be there whole or not at all", config.n_layers);
        }
        if shards.names().any(weights::is_fused_experts) {
            text += "; the experts are fused (mlp.experts.gate_up_proj), expected one tensor per expert as published";
        }
        let gaps = file_gaps(shards, self, dir);
        if gaps.is_empty() {
            text += "; no gap in the file numbers: the last files may be absent, compare the list of files with the download page";
        }
        for gap in gaps {
            text += &format!("; {gap}");
        }
        text
    }
}

fn absent_layers(config: &Config, census: &Census) -> Vec<usize> {
    let mut present = vec![false; config.n_layers + 1];
    for f in &census.found {
        if let Some(i) = f.layer {
            present[i] = true;
        }
    }
    (0..config.n_layers).filter(|&i| !present[i]).collect()
}

/// `3, 7–9`.
fn ranges(sorted: &[usize]) -> String {
    let parts: Vec<String> =
        sorted
            .chunk_by(|a, b| a + 1 == *b)
            .map(|r| {
                if r.len() == 1 {
                    r[0].to_string()
                } else {
                    format!("{}–{}", r[0], r[r.len() - 1])
                }
            })
            .collect();
    parts.join(", ")
}

/// What file names and the index say about absent files.
fn file_gaps(shards: &Shards, census: &Census, dir: Option<&Path>) -> Vec<String> {
    let names: Vec<String> = shards
        .files()
        .iter()
        .filter_map(|f| Some(f.path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    let mut gaps = Vec::new();
    // The index of a published checkpoint says which file should hold each tensor.
    let index = dir.and_then(|d| std::fs::read(d.join("model.safetensors.index.json")).ok());
    let index: Option<serde_json::Value> = index.and_then(|b| serde_json::from_slice(&b).ok());
    if let Some(map) = index.as_ref().and_then(|v| v.get("weight_map")) {
        let files: BTreeSet<&str> = census
            .missing
            .iter()
            .filter_map(|n| map.get(n)?.as_str())
            .filter(|f| !names.iter().any(|n| n == f))
            .collect();
        if !files.is_empty() {
            gaps.push(format!(
                "by model.safetensors.index.json they are in {}, which is absent",
                files.into_iter().collect::<Vec<_>>().join(", ")
            ));
            return gaps;
        }
    }
    // Numbered files: prefix-NNNNN or prefix-NNNNN-of-MMMMM.
    let mut series: BTreeMap<(String, Option<usize>), Vec<usize>> = BTreeMap::new();
    for name in &names {
        if let Some((prefix, number, of)) = numbered(name) {
            series.entry((prefix, of)).or_default().push(number);
        }
    }
    for ((prefix, of), numbers) in series {
        let (first, last) = match of {
            Some(of) => (1, of),
            None => (0, numbers.iter().copied().max().unwrap_or(0)),
        };
        if last > 1 << 20 {
            continue;
        }
        let absent: Vec<usize> = (first..=last).filter(|n| !numbers.contains(n)).collect();
        if !absent.is_empty() {
            let total = last + 1 - first;
            gaps.push(format!(
                "of {total} files {prefix}-*.safetensors the numbers {} are absent",
                ranges(&absent)
            ));
        }
    }
    gaps
}

/// Splits `prefix-NNNNN[-of-MMMMM].safetensors`.
fn numbered(name: &str) -> Option<(String, usize, Option<usize>)> {
    let stem = name.strip_suffix(".safetensors")?;
    let (stem, of) = match stem.rsplit_once("-of-") {
        Some((s, of)) => (s, Some(of.parse().ok()?)),
        None => (stem, None),
    };
    let (prefix, number) = stem.rsplit_once('-')?;
    Some((prefix.to_owned(), number.parse().ok()?, of))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_and_ranges() {
        assert_eq!(numbered("out-00012.safetensors"), Some(("out".into(), 12, None)));
        assert_eq!(numbered("out-mtp-00000.safetensors"), Some(("out-mtp".into(), 0, None)));
        assert_eq!(
            numbered("model-00002-of-00141.safetensors"),
            Some(("model".into(), 2, Some(141)))
        );
        assert_eq!(numbered("model.safetensors"), None);
        assert_eq!(ranges(&[0, 2, 3, 4, 9]), "0, 2–4, 9");
    }
}
