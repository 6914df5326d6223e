//! The order of modules: each uses only what stands below it.

use std::collections::BTreeMap;
use std::path::Path;

use crate::fixture::root;

/// What each module may use. `kernels` sees the pool only for the type of an output tile.
const MAY_USE: [(&str, &[&str]); 12] = [
    ("sys", &[]),
    ("pool", &[]),
    ("kernels", &["pool"]),
    ("store", &["kernels", "pool"]),
    ("experts", &["store", "sys"]),
    ("tokenizer", &[]),
    ("template", &[]),
    ("sample", &["kernels"]),
    ("model", &["experts", "store", "kernels", "pool"]),
    (
        "engine",
        &["model", "experts", "tokenizer", "template", "sample", "store", "kernels", "pool", "sys"],
    ),
    ("cli", &["engine", "experts", "kernels"]),
    (
        "commands",
        &[
            "cli",
            "engine",
            "experts",
            "model",
            "tokenizer",
            "template",
            "sample",
            "store",
            "kernels",
            "pool",
            "sys",
        ],
    ),
];

#[test]
fn no_module_uses_one_above_it() {
    let allowed: BTreeMap<_, _> = MAY_USE.into_iter().collect();
    let mut edges = 0;
    visit(&root().join("src"), &mut |path, text| {
        let relative = path.strip_prefix(root().join("src")).unwrap();
        let module = relative.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if matches!(module, "main" | "lib") {
            return;
        }
        let may =
            allowed.get(module).unwrap_or_else(|| panic!("{module}: not in the table of layers"));
        for (line, code) in
            text.lines().enumerate().filter(|(_, l)| !l.trim_start().starts_with("//"))
        {
            for used in code.split("crate::").skip(1) {
                let used: String =
                    used.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if used.is_empty() {
                    // `use crate::{…}` would hide its edges from this test.
                    panic!("{}:{}: name each module after `crate::`", path.display(), line + 1);
                }
                edges += 1;
                assert!(
                    used == module || may.contains(&used.as_str()),
                    "{}:{}: {module} uses {used}",
                    path.display(),
                    line + 1
                );
            }
        }
    });
    assert!(edges > 50, "only {edges} uses were seen: does the test still read the sources?");
}

/// `unsafe` lives in kernels, the pool and the store; every other file forbids it.
#[test]
fn unsafe_is_forbidden_elsewhere() {
    let mut files = 0;
    visit(&root().join("src"), &mut |path, text| {
        files += 1;
        let allowed = [
            "kernels/amx.rs",
            "kernels/avx2.rs",
            "kernels/avx512.rs",
            "kernels/mod.rs",
            "kernels/neon.rs",
            "kernels/tests.rs",
            "pool.rs",
            "store/mod.rs",
            "lib.rs",
        ];
        if allowed.iter().any(|a| path.ends_with(a)) {
            return;
        }
        assert!(
            text.contains("#![forbid(unsafe_code)]"),
            "{}: no #![forbid(unsafe_code)]",
            path.display()
        );
    });
    assert!(files > 25, "only {files} files were seen");
}

fn visit(dir: &Path, f: &mut dyn FnMut(&Path, &str)) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            visit(&path, f);
        } else if path.extension().is_some_and(|e| e == "rs") {
            f(&path, &std::fs::read_to_string(&path).unwrap());
        }
    }
}
