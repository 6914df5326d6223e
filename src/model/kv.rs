//! The attention cache of one token timeline: per layer and position the latent and the rotated key, and on layers that
//! score keys the index key.
#![forbid(unsafe_code)]

use super::config::Config;
use crate::kernels::Keys;

/// How cache values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// Half precision: the default.
    F16,
    /// Single precision.
    F32,
}

/// Rows of one width.
struct Plane {
    width: usize,
    data: PlaneData,
}

enum PlaneData {
    F16(Vec<u16>),
    F32(Vec<f32>),
}

impl Plane {
    fn new(width: usize, kv: KvType) -> Self {
        let data = match kv {
            KvType::F16 => PlaneData::F16(Vec::new()),
            KvType::F32 => PlaneData::F32(Vec::new()),
        };
        Self { width, data }
    }

    fn len(&self) -> usize {
        let values = match &self.data {
            PlaneData::F16(v) => v.len(),
            PlaneData::F32(v) => v.len(),
        };
        values / self.width
    }

    fn push(&mut self, row: &[f32]) {
        assert_eq!(row.len(), self.width, "width of a cache row");
        match &mut self.data {
            PlaneData::F16(v) => v.extend(row.iter().map(|&x| half::f16::from_f32(x).to_bits())),
            PlaneData::F32(v) => v.extend_from_slice(row),
        }
    }

    fn reserve(&mut self, n: usize) {
        match &mut self.data {
            PlaneData::F16(v) => v.reserve_exact(n * self.width),
            PlaneData::F32(v) => v.reserve_exact(n * self.width),
        }
    }

    fn truncate(&mut self, n: usize) {
        match &mut self.data {
            PlaneData::F16(v) => v.truncate(n * self.width),
            PlaneData::F32(v) => v.truncate(n * self.width),
        }
    }

    fn keys(&self) -> Keys<'_> {
        match &self.data {
            PlaneData::F16(data) => Keys::F16 { data, width: self.width },
            PlaneData::F32(data) => Keys::F32 { data, width: self.width },
        }
    }
}

/// The cache of one timeline. Layer `n_layers` is the MTP layer's, whose rows may lag behind.
pub struct KvCache {
    latents: Vec<Plane>,
    index: Vec<Option<Plane>>,
}

impl KvCache {
    /// An empty cache for this model.
    pub fn new(config: &Config, kv: KvType) -> Self {
        let layers = 0..=config.n_layers;
        let index = |i| {
            let x = config.indexer.as_ref().filter(|_| config.scores_keys(i))?;
            Some(Plane::new(x.head_dim, kv))
        };
        Self {
            latents: layers.clone().map(|_| Plane::new(config.kv_width(), kv)).collect(),
            index: layers.map(index).collect(),
        }
    }

    /// Bytes of one position on all layers.
    pub fn bytes_per_token(config: &Config, kv: KvType) -> u64 {
        let size = match kv {
            KvType::F16 => 2,
            KvType::F32 => 4,
        };
        let index = |i| match &config.indexer {
            Some(x) if config.scores_keys(i) => x.head_dim,
            _ => 0,
        };
        (0..=config.n_layers).map(|i| (config.kv_width() + index(i)) as u64 * size).sum()
    }

    /// Positions that the main layers hold.
    pub fn len(&self) -> usize {
        self.latents[0].len()
    }

    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Positions that `layer` holds.
    pub fn layer_len(&self, layer: usize) -> usize {
        self.latents[layer].len()
    }

    /// Appends latent and rotated key of the next position of `layer`.
    pub fn push(&mut self, layer: usize, row: &[f32]) {
        self.latents[layer].push(row);
    }

    /// Appends the index key of the next position of `layer`, which scores keys.
    pub fn push_index(&mut self, layer: usize, row: &[f32]) {
        if let Some(plane) = &mut self.index[layer] {
            plane.push(row);
        }
    }

    /// Makes room for `n` more positions, so that appending them allocates nothing.
    pub fn reserve(&mut self, n: usize) {
        self.latents.iter_mut().for_each(|p| p.reserve(n));
        self.index.iter_mut().flatten().for_each(|p| p.reserve(n));
    }

    /// Cache rows of `layer`.
    pub fn keys(&self, layer: usize) -> Keys<'_> {
        self.latents[layer].keys()
    }

    /// Index keys of `layer`, if it scores keys.
    pub fn index_keys(&self, layer: usize) -> Option<Keys<'_>> {
        self.index[layer].as_ref().map(Plane::keys)
    }

    /// Forgets every position from `n` on, in all layers. Also undoes a forward pass that failed half way.
    pub fn truncate(&mut self, n: usize) {
        self.latents.iter_mut().for_each(|p| p.truncate(n));
        self.index.iter_mut().flatten().for_each(|p| p.truncate(n));
    }

    /// Forgets every position from `n` on in one layer: undoes a draft of the MTP layer.
    pub fn truncate_layer(&mut self, layer: usize, n: usize) {
        self.latents[layer].truncate(n);
        if let Some(plane) = &mut self.index[layer] {
            plane.truncate(n);
        }
    }

    /// Bytes of one position over all layers, the MTP layer included.
    pub fn bytes_per_position(config: &Config, kv: KvType) -> usize {
        let size = if kv == KvType::F16 { 2 } else { 4 };
        let index: usize = (0..=config.n_layers)
            .filter(|&i| config.scores_keys(i))
            .filter_map(|_| config.indexer.as_ref().map(|x| x.head_dim))
            .sum();
        size * ((config.n_layers + 1) * config.kv_width() + index)
    }
}
