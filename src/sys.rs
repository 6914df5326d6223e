//! What differs between operating systems: cores this process may use, peak memory, free disk space.
//!
//! Everything here has a portable fallback; nothing here knows the model.
#![forbid(unsafe_code)]

/// Number of compute threads to use by default: the physical cores this process may run on.
///
/// Hyper-threads of one core share its vector units, so a second thread per core only costs. The affinity mask and the
/// cgroup quota are respected (the standard library reads both). When the topology cannot be read, the logical count.
pub fn default_threads() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, usize::from);
    physical_cores().map_or(logical, |cores| cores.min(logical)).max(1)
}

/// Distinct physical cores among the CPUs in the affinity mask.
#[cfg(target_os = "linux")]
fn physical_cores() -> Option<usize> {
    let mut cores = std::collections::BTreeSet::new();
    for cpu in allowed_cpus()? {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        cores.insert(std::fs::read_to_string(path).ok()?);
    }
    (!cores.is_empty()).then_some(cores.len())
}

#[cfg(not(target_os = "linux"))]
fn physical_cores() -> Option<usize> {
    None
}

/// CPU numbers in this process' affinity mask, from `/proc/self/status`.
#[cfg(target_os = "linux")]
fn allowed_cpus() -> Option<Vec<usize>> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?.trim();
    let mut cpus = Vec::new();
    for part in list.split(',') {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        let (a, b): (usize, usize) = (a.parse().ok()?, b.parse().ok()?);
        if b < a || b > 1 << 16 {
            return None;
        }
        cpus.extend(a..=b);
    }
    Some(cpus)
}

/// Peak resident set of this process in bytes, mapped file pages included; 0 when the system does not tell.
pub fn peak_rss_bytes() -> u64 {
    #[cfg(target_os = "linux")]
    {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kib = status
            .lines()
            .find_map(|l| l.strip_prefix("VmHWM:"))
            .and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }
    #[cfg(not(target_os = "linux"))]
    {
        0
    }
}

/// Bytes that this process may still write where `dir` lies; `None` when the system does not tell.
pub fn free_bytes(dir: &std::path::Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let fs = rustix::fs::statvfs(dir).ok()?;
        fs.f_bavail.checked_mul(fs.f_frsize)
    }
    #[cfg(not(unix))]
    {
        let _ = dir;
        None
    }
}

/// Name of this CPU, for reports.
pub fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, n)| n.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_at_least_one_and_at_most_the_logical_count() {
        let n = default_threads();
        assert!(n >= 1 && n <= std::thread::available_parallelism().unwrap().get());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn peak_rss_is_plausible() {
        assert!(peak_rss_bytes() > 1 << 20);
    }

    #[test]
    #[cfg(unix)]
    fn free_space_is_known_where_a_directory_is() {
        assert!(free_bytes(std::path::Path::new(".")).is_some());
        assert_eq!(free_bytes(std::path::Path::new("no such directory")), None);
    }
}
