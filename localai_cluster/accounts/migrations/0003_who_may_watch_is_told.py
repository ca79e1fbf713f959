"""NOTIFY for everybody whose access ends, from the rows themselves: no way of changing them is left out.

A session that is deleted is named by the MD5 of its key, a user whose password, activity or rights change by
id, and the owner of a key that is revoked or deleted likewise. Many sessions that go at once are not named: an
empty notice means all.
"""

from django.conf import settings
from django.db import migrations

TELL = """
CREATE FUNCTION tell_session_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT count(*) FROM gone) > 100 THEN
        PERFORM pg_notify('cluster_access', '');
    ELSE
        PERFORM pg_notify('cluster_access', 'session ' || md5(session_key)) FROM gone;
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION tell_user_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('cluster_access', 'user ' || OLD.id);
    RETURN NULL;
END $$;
CREATE FUNCTION tell_key_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('cluster_access', 'user ' || OLD.user_id);
    RETURN NULL;
END $$;

CREATE TRIGGER session_ended AFTER DELETE ON django_session
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION tell_session_ended();
CREATE TRIGGER user_changed AFTER UPDATE ON auth_user
    FOR EACH ROW WHEN ((OLD.password, OLD.is_active, OLD.is_staff, OLD.is_superuser)
        IS DISTINCT FROM (NEW.password, NEW.is_active, NEW.is_staff, NEW.is_superuser))
    EXECUTE FUNCTION tell_user_changed();
CREATE TRIGGER user_deleted AFTER DELETE ON auth_user
    FOR EACH ROW EXECUTE FUNCTION tell_user_changed();
CREATE TRIGGER key_revoked AFTER UPDATE ON api_keys
    FOR EACH ROW WHEN (OLD.revoked_at IS DISTINCT FROM NEW.revoked_at) EXECUTE FUNCTION tell_key_ended();
CREATE TRIGGER key_deleted AFTER DELETE ON api_keys
    FOR EACH ROW EXECUTE FUNCTION tell_key_ended();
"""
TELL_NO_MORE = """
DROP TRIGGER session_ended ON django_session;
DROP TRIGGER user_changed ON auth_user;
DROP TRIGGER user_deleted ON auth_user;
DROP TRIGGER key_revoked ON api_keys;
DROP TRIGGER key_deleted ON api_keys;
DROP FUNCTION tell_session_ended();
DROP FUNCTION tell_user_changed();
DROP FUNCTION tell_key_ended();
"""


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0002_names_for_people"),
        ("sessions", "0001_initial"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [migrations.RunSQL(TELL, TELL_NO_MORE)]
