// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

/** 12345.6 is "12,346", 3.21 is "3.2". */
export function number(value) {
  return (Math.abs(value) < 100 ? tenths : whole).format(value);
}

/** A share from 0 to 1, as "12.3%"; what rounds to all or nothing without being it says so. */
export function percent(share) {
  if (share > 0 && share < 0.001) return "<0.1%";
  if (share < 1 && share > 0.999) return ">99.9%";
  return `${tenths.format(100 * share)}%`;
}

/** Seconds as "0.31 s", "42 s" or "3:07 min". */
export function seconds(value) {
  if (value < 10) return `${value.toFixed(value < 1 ? 2 : 1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  const total = Math.round(value);
  return `${Math.floor(total / 60)}:${String(total % 60).padStart(2, "0")} min`;
}

/** Bytes as "1.5 GiB". */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${number(value)} ${units[power]}`;
}

/** "1 token", "2 tokens". */
export function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}
