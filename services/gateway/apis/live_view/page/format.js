// Formats numbers.

export function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(value >= 1e7 ? 0 : 1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)}k`;
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toString() : value.toFixed(1);
}

export function duration(ms) {
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return ms >= 10 ? `${Math.round(ms)} ms` : `${ms.toFixed(1)} ms`;
}

// Time of day in the browser's time zone.
export const clock = (unixMs) => new Date(unixMs).toLocaleTimeString("en-GB");

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`);

export const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
