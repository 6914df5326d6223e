//! Stamps the commit into the program. Works without git and never fails the build.

use std::path::Path;
use std::process::Command;

fn main() {
    let git = |args: &[&str]| -> Option<String> {
        let out = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
        Some(String::from_utf8(out.stdout).ok()?.trim().to_owned()).filter(|s| !s.is_empty())
    };
    // Only this project's own repository counts, not one that a source archive was unpacked into.
    let here = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let top = git(&["rev-parse", "--show-toplevel"]);
    let ours = top
        .is_some_and(|t| Path::new(&t).canonicalize().ok() == Path::new(&here).canonicalize().ok());
    let commit = if ours { git(&["rev-parse", "--short=12", "HEAD"]) } else { None };
    println!("cargo:rustc-env=GLM_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
    println!("cargo:rerun-if-changed=build.rs");
    // HEAD names a branch; the branch's own file, or the log of HEAD, changes with every commit.
    for file in [".git/HEAD", ".git/logs/HEAD"] {
        if Path::new(file).exists() {
            println!("cargo:rerun-if-changed={file}");
        }
    }
}
