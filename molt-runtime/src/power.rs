//! Whether the machine runs from a battery, as the kernel says (`Documentation/ABI/testing/sysfs-class-power`).

use std::fs;
use std::path::Path;

/// Whether there is a battery and no external supply is online. `root` is where sysfs is mounted.
pub fn on_battery(root: &Path) -> bool {
    let Ok(supplies) = fs::read_dir(root.join("class/power_supply")) else { return false };
    let mut battery = false;
    for supply in supplies.flatten() {
        let word = |name: &str| fs::read_to_string(supply.path().join(name)).unwrap_or_default().trim().to_owned();
        match word("type").as_str() {
            // That of a mouse is none of the machine's.
            "Battery" => battery |= word("scope") != "Device",
            "Mains" | "USB" | "Wireless" if word("online") == "1" => return false,
            _ => {}
        }
    }
    battery
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_runs_from_its_battery_where_nothing_else_is_online() {
        let check = |supplies: &[(&str, &[(&str, &str)])], expected: bool| {
            let root = tempfile::tempdir().unwrap();
            for (name, files) in supplies {
                let folder = root.path().join("class/power_supply").join(name);
                fs::create_dir_all(&folder).unwrap();
                files.iter().for_each(|(file, text)| fs::write(folder.join(file), format!("{text}\n")).unwrap());
            }
            assert_eq!(on_battery(root.path()), expected, "{supplies:?}");
        };
        let battery: (&str, &[(&str, &str)]) = ("BAT0", &[("type", "Battery"), ("status", "Discharging")]);
        check(&[], false);
        check(&[battery], true);
        check(&[battery, ("AC", &[("type", "Mains"), ("online", "0")])], true);
        check(&[battery, ("AC", &[("type", "Mains"), ("online", "1")])], false);
        check(&[battery, ("ucsi", &[("type", "USB"), ("online", "1")])], false);
        check(&[("AC", &[("type", "Mains"), ("online", "0")])], false);
        check(&[("hid", &[("type", "Battery"), ("scope", "Device")])], false);
    }
}
