//! Instruction sets that kernels are written for, and what this CPU has.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

/// One level of instruction set support, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// The scalar definition, compiled for the target's baseline.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// `Avx2` with the VNNI dot product on 256-bit registers.
    Avx2Vnni,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// `Avx512` with the VNNI dot products.
    Avx512Vnni,
    /// `Avx512Vnni` with AMX int8 tiles.
    Amx,
    /// 64-bit Arm.
    Neon,
    /// `Neon` with the int8 dot product.
    NeonDot,
    /// `NeonDot` with int8 matrix products.
    NeonI8mm,
}

impl Isa {
    /// Every level, weakest first.
    pub const ALL: [Self; 9] = [
        Self::Portable,
        Self::Avx2,
        Self::Avx2Vnni,
        Self::Avx512,
        Self::Avx512Vnni,
        Self::Amx,
        Self::Neon,
        Self::NeonDot,
        Self::NeonI8mm,
    ];

    /// Whether this CPU runs kernels of this level.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni => Self::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                Self::Avx512.is_available() && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512Vnni.is_available() && super::amx::available(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => {
                Self::Neon.is_available() && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => {
                Self::NeonDot.is_available() && std::arch::is_aarch64_feature_detected!("i8mm")
            }
            // Those of another architecture.
            _ => false,
        }
    }

    /// The levels that this CPU has, weakest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The strongest level that this CPU has.
    pub fn best() -> Self {
        Self::available().into_iter().max().unwrap_or(Self::Portable)
    }

    /// The name that `--isa` takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx2Vnni => "avx2vnni",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512vnni",
            Self::Amx => "amx",
            Self::Neon => "neon",
            Self::NeonDot => "neon-dotprod",
            Self::NeonI8mm => "neon-i8mm",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let isa = Self::ALL.into_iter().find(|isa| isa.name() == s);
        isa.ok_or_else(|| format!("unknown instruction set `{s}`, expected one of {}", names()))
    }
}
