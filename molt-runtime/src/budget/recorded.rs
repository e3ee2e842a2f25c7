//! The readers of budgets on whole machines, as `deploy/vm/record` has printed them.

use std::path::Path;

use molt_scheduler::units::{Bytes, Time};

use crate::alarm::Alarm;
use crate::budget::{BudgetSource as _, CgroupBudget, HostBudget, PressureBudget};

/// Lays a recorded machine out below a folder: a file for each line with a path.
fn lay_out(recorded: &str, root: &Path) {
    for file in recorded.split("== ").skip(1) {
        let (path, text) = file.split_once('\n').unwrap();
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

/// What the readers say of a machine, in bytes: the host; the control group, and the group that has the least, where one is
/// limited; and whether the group adds up its own waiting.
fn check(recorded: &str, host: u64, cgroup: Option<(u64, &str)>, own_pressure: bool) {
    let folder = tempfile::tempdir().unwrap();
    lay_out(recorded, folder.path());
    let (proc, mount) = (folder.path().join("proc"), folder.path().join("cgroup"));
    let found = HostBudget::new(&proc, Bytes::ZERO).budget(Time::START);
    assert_eq!(found, Some(Bytes::new(host)));
    let mut source = CgroupBudget::new(&proc, &mount).unwrap();
    let found = source.budget(Time::START);
    assert_eq!(found, cgroup.map(|(bytes, _)| Bytes::new(bytes)));
    if let Some((_, group)) = cgroup {
        assert!(source.reason().contains(&format!("{group},")), "{}", source.reason());
    }
    let pressure = |file: &Path| PressureBudget::new("pressure", file, Alarm::default());
    let mut machine = pressure(&proc.join("pressure/memory")).unwrap();
    assert_eq!(machine.budget(Time::START), None, "one look says nothing of what grows");
    assert_eq!(source.pressure_file().is_some_and(|file| pressure(&file).is_some()), own_pressure);
}

#[test]
fn a_hybrid_whose_groups_have_no_limits() {
    let recorded = include_str!("../../tests/data/machines/hybrid-groups-without-limits.txt");
    // MemAvailable, and what the daemon holds that is no file's.
    check(recorded, (22_524_496 + 12_084) << 10, None, false);
}

#[test]
fn a_service_with_a_high_mark_on_debian_13() {
    let recorded = include_str!("../../tests/data/machines/debian-13-memory-high.txt");
    // MemoryHigh=96M, of which is used what is charged to the service and no page cache; what is its own may go.
    let (high, current, page_cache, own) = (100_663_296, 13_537_280, 8_192 + 4_096, 12_444 << 10);
    let cgroup = (high - (current - page_cache) + own, "system.slice/moltd.service");
    check(recorded, (747_652 + 12_444) << 10, Some(cgroup), true);
}
