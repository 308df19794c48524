/** How numbers are shown. A number is the metric's value: rounded, with a unit, and not changed otherwise. */

const NONE = "–";
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** At most 3 significant digits and 3 decimals, without an exponent: 12.3, 0.012. */
function digits(value: number): string {
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(3)); // before the size is taken: 0.9996 is rounded to 1.00
  const size = Math.floor(Math.log10(Math.abs(rounded)));
  return rounded.toFixed(Math.max(0, Math.min(3, 2 - size)));
}

/** 1,234; from ten million on 12.3 M, from a billion on 1.23 G. */
export function count(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 1e7) return whole.format(value);
  return Math.abs(value) < 1e9 ? `${digits(value / 1e6)} M` : `${digits(value / 1e9)} G`;
}

/** "1 block", "2 blocks". */
export function counted(value: number, noun: string, plural = `${noun}s`): string {
  return `${count(value)} ${value === 1 ? noun : plural}`;
}

/** A rate: 12.3, 1,234. */
export function rate(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) < 999.5 ? digits(value) : count(value);
}

/** 840 µs, 12.3 ms, 1.25 s, 3 min 5 s, 2 h 4 min. */
export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size < 0.9995e-3) return `${Math.round(value * 1e6)} µs`;
  if (size < 0.9995) return `${digits(value * 1e3)} ms`;
  if (size < 59.95) return `${digits(value)} s`;
  const all = Math.round(value);
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
}

/** A duration that grows, such as an uptime, rounded down: "3 s", "2 min 5 s", "2 h 4 min". */
export function age(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  const all = Math.max(0, Math.floor(value));
  return all < 60 ? `${all} s` : seconds(all);
}

/** 42%; "–" if `all` is 0. Shows 100% only if `part` equals `all`, and 0% only if `part` is 0 (0.1% is the least). */
export function share(part: number, all: number): string {
  if (!all) return NONE;
  const percent = (100 * part) / all;
  if (percent > 99 && percent < 100) return `${(Math.floor(percent * 10) / 10).toFixed(1)}%`;
  if (percent > 0 && percent < 1) return `${Math.max(percent, 0.1).toFixed(1)}%`;
  return `${Math.round(percent)}%`;
}

/** The name of a tenant, or "(none)" for requests without a tenant. */
export function tenantName(tenant: string): string {
  return tenant || "(none)";
}

/** An id that fits a line. Show the whole id in a title. */
export function shortId(id: string, most = 22): string {
  return id.length <= most ? id : `${id.slice(0, most - 7)}…${id.slice(-6)}`;
}
