// Whether pictures are drawn on dark paper.

import { useEffect, useMemo, useState } from "preact/hooks";
import { useExplorer } from "../context";

/** Whether the explorer is dark, by its own theme or the system's. */
export function useDark(): boolean {
  const { theme } = useExplorer();
  const media = useMemo(() => matchMedia("(prefers-color-scheme: dark)"), []);
  const [dark, setDark] = useState(media.matches);
  useEffect(() => {
    const changed = () => setDark(media.matches);
    media.addEventListener("change", changed);
    return () => media.removeEventListener("change", changed);
  }, []);
  return theme ? theme === "dark" : dark;
}
