//! What differs between operating systems: cores this process may use, peak memory, free disk space.
//!
//! Everything here has a portable fallback; nothing here knows the model.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

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

/// Bytes of memory that can be had without swapping: what the system says is available, or less where a control group of
/// this process, or one above it, allows less. `None` when the system does not tell.
pub fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let available = line.split_whitespace().next()?.parse::<u64>().ok()? * 1024;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let room = control_groups(&groups).filter_map(|dir| room_in_group(&dir)).min();
    Some(room.map_or(available, |room| room.min(available)))
}

/// Directories of the memory control groups named in `/proc/self/cgroup`, and of all above them. A process inside a
/// container sees its own group at the root.
fn control_groups(list: &str) -> impl Iterator<Item = PathBuf> {
    let mut dirs = Vec::new();
    for line in list.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let root = match controllers {
            "" => "/sys/fs/cgroup",
            c if c.split(',').any(|c| c == "memory") => "/sys/fs/cgroup/memory",
            _ => continue,
        };
        for above in Path::new(path.trim_start_matches('/')).ancestors() {
            dirs.push(Path::new(root).join(above));
        }
    }
    dirs.into_iter()
}

/// Limit of a control group less what it uses, its file cache not counted.
fn room_in_group(dir: &Path) -> Option<u64> {
    let read = |names: [&str; 2]| {
        names
            .iter()
            .find_map(|n| std::fs::read_to_string(dir.join(n)).ok()?.trim().parse::<u64>().ok())
    };
    let limit = read(["memory.max", "memory.limit_in_bytes"])?;
    let used = read(["memory.current", "memory.usage_in_bytes"])?;
    let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let cache = stat
        .lines()
        .find_map(|l| l.strip_prefix("inactive_file ")?.parse::<u64>().ok())
        .unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

/// Opens a file for reads that go past the system's cache: buffer, length and position must be multiples of 4096.
///
/// # Errors
/// The file cannot be opened so; on systems without such reads always.
pub fn open_direct(path: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt;
        File::options().read(true).custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32).open(path)
    }
    #[cfg(not(target_os = "linux"))]
    {
        Err(io::Error::new(io::ErrorKind::Unsupported, path.display().to_string()))
    }
}

/// Asks the system to forget what it has cached of a file.
pub fn drop_from_cache(file: &File) {
    // Failing only makes the next read warm.
    #[cfg(target_os = "linux")]
    if let Ok(len) = file.metadata().map(|m| m.len()) {
        let len = std::num::NonZeroU64::new(len);
        let _ = rustix::fs::fadvise(file, 0, len, rustix::fs::Advice::DontNeed);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// A buffer for direct reads: its start is a multiple of the page size.
///
/// # Errors
/// The system refuses the memory.
pub fn aligned_buffer(bytes: usize) -> io::Result<memmap2::MmapMut> {
    memmap2::MmapMut::map_anon(bytes)
}

/// Reads from position `at` of the file: how many bytes, 0 at its end.
///
/// # Errors
/// The read fails.
pub fn read_at(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    #[cfg(unix)]
    {
        std::os::unix::fs::FileExt::read_at(file, buffer, at)
    }
    #[cfg(windows)]
    {
        std::os::windows::fs::FileExt::seek_read(file, buffer, at)
    }
}

/// Fills `buffer` from position `at` of the file.
///
/// # Errors
/// The read fails or the file ends.
pub fn read_exact_at(file: &File, buffer: &mut [u8], at: u64) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match read_at(file, &mut buffer[done..], at + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Bytes that this process may still write where `dir` lies; `None` when the system does not tell.
pub fn free_bytes(dir: &Path) -> Option<u64> {
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
    #[cfg(target_os = "linux")]
    fn memory_is_known_and_control_groups_are_found_to_the_root() {
        assert!(available_memory().unwrap() > 1 << 20);
        let list = "12:cpu,memory:/a/b\n3:pids:/x\n0::/c\n";
        let dirs: Vec<_> = control_groups(list).collect();
        let v1 = ["memory/a/b", "memory/a", "memory/"].map(|d| Path::new("/sys/fs/cgroup").join(d));
        let v2 = ["c", ""].map(|d| Path::new("/sys/fs/cgroup").join(d));
        assert_eq!(dirs, [&v1[..], &v2].concat());
        let tmp = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(tmp.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        write("memory.current", "70\n");
        assert_eq!(room_in_group(tmp.path()), None);
        write("memory.max", "100\n");
        write("memory.stat", "anon 50\ninactive_file 20\n");
        assert_eq!(room_in_group(tmp.path()), Some(50));
    }

    #[test]
    #[cfg(unix)]
    fn free_space_is_known_where_a_directory_is() {
        assert!(free_bytes(Path::new(".")).is_some());
        assert_eq!(free_bytes(Path::new("no such directory")), None);
    }
}
