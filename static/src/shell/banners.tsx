// Banners of every page: notices of the server, a page that is older than the server, and
// a session that may not see anything any more.
import { useEffect, useRef, type ReactNode } from "react";
import { Link, useLocation } from "react-router";
import { useLive } from "../live/hooks";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Icon } from "../ui/icons";
import { Problem } from "../ui/problem";

/** The page on which identity conflicts are decided: a banner there would only repeat it. */
const CONFLICTS = "/app/nodes";

/** The page that shows the parts of the system and the notices about them. */
const HEALTH = "/app/health";
const OF_THE_SYSTEM: ReadonlySet<string> = new Set(["database-unreachable", "no-controller", "nats-unreachable", "no-tasks", "redis-unreachable"]);

interface BannersProps {
  failure: Error | null;
  onRetry: () => void;
}

export function Banners({ failure, onRetry }: BannersProps): ReactNode {
  const notices = useLive((state) => state.notices);
  const place = useLocation().pathname;
  const outdated = useLive((state) => state.outdated);
  const forbidden = useLive((state) => state.connection === "forbidden");
  useNoticeAnnouncements(notices);
  const shown = notices.filter((notice) => notice.id !== "identity-conflicts" || place !== CONFLICTS);
  if (shown.length === 0 && !outdated && !forbidden && failure === null) return null;
  return (
    <section className="banners" aria-label="Notices">
      {failure !== null && <Problem error={failure} />}
      {forbidden && (
        <Banner level="error" text="This account no longer has access to the cluster." hint="Ask an administrator for access, or sign in with another account.">
          <Button small onClick={onRetry}>
            Try again
          </Button>
        </Banner>
      )}
      {outdated && (
        <Banner level="info" text="A new version of this page is available." hint="Reloading discards unsaved input.">
          <Button small onClick={() => window.location.reload()}>
            Reload
          </Button>
        </Banner>
      )}
      {shown.map((notice) => (
        <Banner key={notice.id} {...notice}>
          {notice.id === "identity-conflicts" && <Link to={`${CONFLICTS}#conflicts`}>Decide</Link>}
          {OF_THE_SYSTEM.has(notice.id) && place !== HEALTH && <Link to={HEALTH}>System health</Link>}
        </Banner>
      ))}
    </section>
  );
}

interface BannerProps {
  level: "info" | "warning" | "error";
  text: string;
  hint: string;
  children?: ReactNode;
}

export function Banner({ level, text, hint, children }: BannerProps): ReactNode {
  return (
    <div className={`banner ${level}`}>
      <Icon name={level === "error" ? "error" : "warning"} />
      <p className="grow">
        <strong>{text}</strong>
        {hint !== "" && <> {hint}</>}
      </p>
      {children}
    </div>
  );
}

/** Says a notice when it comes; those that were there at first are read with the page. */
function useNoticeAnnouncements(notices: readonly { id: string; text: string }[]): void {
  const shownNotices = useRef<Set<string> | null>(null);
  useEffect(() => {
    const previous = shownNotices.current;
    shownNotices.current = new Set(notices.map((notice) => notice.id));
    if (previous === null) return;
    for (const notice of notices) if (!previous.has(notice.id)) announce(notice.text);
  }, [notices]);
}
