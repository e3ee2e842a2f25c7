//! What is asked of rows, and whether it was found.

use super::rows::{Direction, Row};
use super::setting::Setting;
use crate::bench::results::Claim;

/// What is exact by construction may differ by rounding: means over 64 positions, in nats.
const ROUNDING: f64 = 1e-3;

/// The most divergence over 64 tokens that a carry down may leave, in nats.
const GOALS: [(Setting, f64); 3] = [(Setting::Fast, 0.12), (Setting::Default, 0.05), (Setting::Faithful, 0.035)];

/// Goals for each way down, and exactness of what is exact.
pub fn claims(rows: &[Row]) -> Vec<Claim> {
    let most = |row: &Row| {
        let goal = GOALS.into_iter().find(|(setting, _)| *setting == row.setting).map(|(_, most)| most);
        let goal = goal.filter(|_| row.direction == Direction::Down);
        goal.or(row.setting.is_exact().then_some(ROUNDING))
    };
    let claim = |row: &Row| {
        let most = most(row)?;
        let (pair, setting, context) = (&row.pair, row.setting.name(), row.context_tokens);
        let claim = format!("{pair}, {setting}, {context} tokens: kl over 64 tokens is at most {most}");
        Some(Claim::new(claim, row.kl_64 <= most, format!("{:.4} over {} seams", row.kl_64, row.seams)))
    };
    rows.iter().filter_map(claim).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_its_goal() {
        let row = |setting, direction, kl_64| Row {
            pair: "tier0:tier1".into(),
            direction,
            setting,
            context_tokens: 512,
            cost_ratio: 1.0,
            carry_ms: 1.0,
            reread_ms: 1.0,
            seam_jsd_ratio: None,
            kl_seam: 0.0,
            kl_8: 0.0,
            kl_64,
            kl_256: 0.0,
            kl_64_low: None,
            kl_64_high: None,
            top1_64: 1.0,
            nll_delta_256: 0.0,
            ppl_ratio: 1.0,
            seams: 4,
        };
        let check = |setting, direction, kl_64, expected: Option<bool>| {
            let found = claims(&[row(setting, direction, kl_64)]);
            assert_eq!(found.first().map(|claim| claim.holds), expected, "{setting:?} {kl_64}");
        };
        check(Setting::Default, Direction::Down, 0.05, Some(true));
        check(Setting::Default, Direction::Down, 0.051, Some(false));
        check(Setting::Default, Direction::Up, 0.051, None);
        check(Setting::WithoutChosen, Direction::Down, 9.0, None);
        check(Setting::Keepsake, Direction::Up, 0.0, Some(true));
        check(Setting::Healed, Direction::Down, 0.01, Some(false));
    }
}
